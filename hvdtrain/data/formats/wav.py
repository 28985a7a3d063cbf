"""Whether a .wav file is whole. Libraries read what there is of a file that was cut off, or that was never closed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

UNKNOWN_SIZE = 0x7FFFF000
"""Sizes from this one on stand for a length that was unknown when the header was written, as by ffmpeg and sox into a pipe."""


def damage(stream: BinaryIO, size: int) -> str:
    r"""What is wrong with a file that begins at the stream's position and has `size` bytes; '': nothing, or it is no RIFF file.

    >>> import io
    >>> header = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0" + bytes(16) + b"data"
    >>> damage(io.BytesIO(header + b"\4\0\0\0" + bytes(4)), 48), damage(io.BytesIO(header + b"\4\0\0\0\0"), 45)
    ('', 'sound of 1 bytes, where its header says 4 (was it cut off?)')
    >>> damage(io.BytesIO(header + bytes(4) + bytes(8)), 52)
    'a header that says 0 bytes before sound of 8 (was its writer closed?)'
    """
    head = stream.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return ""
    place = 12
    while len(chunk := stream.read(8)) == 8:
        says, there = int.from_bytes(chunk[4:], "little"), size - place - 8
        if chunk[:4] == b"data":
            if says > there and says < UNKNOWN_SIZE:
                return f"sound of {there} bytes, where its header says {says} (was it cut off?)"
            if says == 0 < there and int.from_bytes(head[4:8], "little") + 8 < size:
                return f"a header that says 0 bytes before sound of {there} (was its writer closed?)"
            return ""
        place += 8 + says + says % 2
        stream.seek(says + says % 2, 1)
    return "a header without sound (was it cut off?)"


def damage_of_file(path: str | Path) -> str:
    """`damage` of a file. Raises: OSError."""
    with open(path, "rb") as file:
        return damage(file, os.fstat(file.fileno()).st_size)
