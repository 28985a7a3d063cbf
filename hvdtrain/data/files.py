"""The files behind datasets: their sizes as text, and whether they change while a training runs."""

from __future__ import annotations

import errno
import os
import re
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.errors import DataError

A_COPY = re.compile(r"(partial-)?[0-9a-f]{16}-.")
"""The names of copies that a plug-in makes of data files, complete or partial. Other files in its folder are left alone."""


def why_not_opened(error: OSError) -> str:
    """Why an intact file cannot be opened, for messages; '': for another reason than the limit of open files, or a lock."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"the limit of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files of a process (ulimit -n)"
    if error.errno in (errno.EAGAIN, errno.EACCES, errno.ENOLCK) and "lock" in str(error):
        return "one that a program locks, which may be writing to it (wait until that has ended, or read a copy)"
    return ""


UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(value: int | str) -> int | None:
    """A size in bytes; None (no limit) if it is negative. Raises: ValueError.

    >>> parse_size("1.5k"), parse_size(7), parse_size("-1")
    (1536, 7, None)
    """
    text = str(value).strip()
    unit = UNITS.get(text[-1:].upper(), 1)
    size = float(text[:-1] if unit > 1 else text)
    if size in (float("inf"), float("-inf")):
        raise ValueError(value)
    return None if size < 0 else int(size * unit)


def size_text(size: int) -> str:
    """A number of bytes as text.

    >>> size_text(5 << 30), size_text(3_456_789), size_text(10_000)
    ('5.0 GB', '3.3 MB', '9.8 KB')
    """
    for unit, factor in reversed(UNITS.items()):
        if size >= factor:
            return f"{size / factor:.1f} {unit}B"
    return f"{size} bytes"


FileStamp = tuple[int, int, int, int]


def file_stamp(about: os.stat_result) -> FileStamp:
    """Numbers that change if a file is replaced or written to: device, inode, size, modification time."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def check_same(path: Path, before: FileStamp, now: FileStamp) -> None:
    """Raises: DataError, if a file was replaced or changed."""
    if before == now:
        return
    if before[:2] != now[:2]:
        difference = "another file in its place"
    elif before[2] != now[2]:
        difference = f"one of {now[2]} bytes instead of {before[2]}"
    else:
        changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now[3] / 1e9))
        difference = f"one that was modified at {changed}"
    raise DataError(
        f"{path}: expected the file that was opened at the start, got {difference} "
        "(write new data to a new file; training can be resumed from the last checkpoint)"
    )


class Unchanged:
    """Remembers the stamps of files, to detect later changes.

    A memory-mapped file that was replaced (by renaming) can still be read; one that was written to yields the new data, and one
    that was truncated ends the process when the missing part is read (SIGBUS).
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._before = {path: stamp for path in dict.fromkeys(paths) if (stamp := _stamp_of(path)) is not None}

    def check(self) -> None:
        """Raises: DataError, if one of the files was replaced or changed."""
        for path, before in self._before.items():
            now = _stamp_of(path)
            if now is None:
                raise DataError(f"{path}: expected the file that was opened at the start, got: no such file")
            check_same(Path(path), before, now)


def _stamp_of(path: str) -> FileStamp | None:
    try:
        return file_stamp(os.stat(path))
    except OSError:  # opening it gives a better message
        return None


def text_lines(content: bytes) -> list[str]:
    r"""The lines of a text in UTF-8, without the mark that Windows' editors write before the first one, and without blanks at the
    end of a line; a line of nothing else keeps them, as a vocabulary may have a blank. Raises: UnicodeDecodeError.

    >>> text_lines(b"\xef\xbb\xbfa \r\n \nb c\n")
    ['a', ' ', 'b c']
    """
    lines = content.decode("utf-8-sig").removesuffix("\n").split("\n")
    return [line.rstrip() or line.rstrip("\r") for line in lines]
