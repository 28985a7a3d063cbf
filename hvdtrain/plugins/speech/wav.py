"""Whether a file of sound is whole. Libraries read what there is of a file that was cut off, or that was never closed."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import BinaryIO

UNKNOWN_SIZE = 0x7FFFF000
"""Sizes from this one on stand for a length that was unknown when the header was written, as by ffmpeg and sox into a pipe."""

W64 = b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\x00\x00"

LAST_PAGE = 1 << 16
"""Bytes in which the last page of an Ogg file begins."""


def damage(stream: BinaryIO, size: int) -> str:
    r"""What is wrong with a file of `size` bytes from the stream's position on; '': nothing that its header would show.

    >>> import io
    >>> header = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0" + bytes(16) + b"data"
    >>> damage(io.BytesIO(header + b"\4\0\0\0" + bytes(4)), 48), damage(io.BytesIO(header + b"\4\0\0\0\0"), 45)
    ('', 'sound of 1 bytes, where its header says 4 (was it cut off?)')
    >>> damage(io.BytesIO(header + bytes(4) + bytes(8)), 52)
    'a header that says 0 bytes before sound of 8 (was its writer closed?)'
    >>> damage(io.BytesIO(b".snd\0\0\0\x18\0\0\0\x09" + bytes(12 + 8)), 32)
    '32 bytes, where its header says 33 (was it cut off?)'
    """
    begin = stream.tell()
    head = stream.read(1024)
    stream.seek(begin + 12)
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return _damage_of_riff(stream, head, size)
    if head[:4] == b"OggS":
        stream.seek(begin + max(0, size - LAST_PAGE))
        last = stream.read(LAST_PAGE).rpartition(b"OggS")[2]
        return "" if len(last) > 1 and last[1] & 4 else "no last page (was it cut off?)"
    says = 0
    if head.startswith(W64):
        says = int.from_bytes(head[16:24], "little")
    elif head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        says = int.from_bytes(head[4:8], "big") + 8
    elif head[:4] == b".snd":
        says = int.from_bytes(head[4:8], "big") + int.from_bytes(head[8:12], "big")
    elif (nist := re.match(rb"NIST_1A\s+(\d+)", head)) and b"embedded" not in head:  # which says that it is compressed
        counts = {name: int(value) for name, value in re.findall(rb"(\w+) -i (\d+)", head)}
        says = int(nist[1]) + math.prod(counts.get(name, 0) for name in (b"sample_count", b"sample_n_bytes", b"channel_count"))
    is_known = says < (1 << 62 if head.startswith(W64) else UNKNOWN_SIZE)
    return f"{size} bytes, where its header says {says} (was it cut off?)" if is_known and says > size else ""


def _damage_of_riff(stream: BinaryIO, head: bytes, size: int) -> str:
    place = 12
    large = int.from_bytes(head[28:36], "little")  # of RF64: 'ds64', its size, that of the file, that of the sound
    while len(chunk := stream.read(8)) == 8:
        says = int.from_bytes(chunk[4:], "little")
        there = size - place - 8
        if chunk[:4] == b"data":
            is_large = head[:4] == b"RF64" and says == 0xFFFFFFFF
            if (is_large and large > there) or there < says < UNKNOWN_SIZE:
                return f"sound of {there} bytes, where its header says {large if is_large else says} (was it cut off?)"
            if says == 0 < there and int.from_bytes(head[4:8], "little") + 8 < size:
                return f"a header that says 0 bytes before sound of {there} (was its writer closed?)"
            return ""
        place += 8 + says + says % 2
        stream.seek(says + says % 2, 1)
    return "a header without sound (was it cut off?)"


def is_length_guessed(stream: BinaryIO) -> bool:
    """Whether this is an mp3 file without the header with its length: libsndfile then guesses it by the first bit rate."""
    head = stream.read(10)
    begin = 0
    if head[:3] == b"ID3":  # a tag before the sound
        begin = 10 + sum((byte & 127) << shift for byte, shift in zip(head[6:10], (21, 14, 7, 0), strict=True))
    stream.seek(begin)
    first = stream.read(200)
    is_mp3 = first[:1] == b"\xff" and first[1:2] >= b"\xe0"
    return is_mp3 and not any(mark in first for mark in (b"Xing", b"Info", b"VBRI"))


def damage_of_file(path: str | Path) -> str:
    """`damage` of a file. Raises: OSError."""
    with open(path, "rb") as file:
        return damage(file, os.fstat(file.fileno()).st_size)
