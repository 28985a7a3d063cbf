"""Copying a file once, however many processes want the copy."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.errors import DataError

BLOCK = 8 << 20
"""Bytes read and written at once."""

SYNC = 32
"""Blocks after which what was written is forced to the disk: so the last of it takes no minutes without a sign of life."""

Progress = Callable[[int], None]
"""Is told a number that changes as long as the copying makes progress, here or in the process that is waited for."""


def look_at(original: Path) -> tuple[int, int]:
    """Size in bytes, and time of change in nanoseconds. Raises: DataError."""
    try:
        about = original.stat()
    except OSError as error:
        raise DataError(f"{original}: expected a file, got: {error.strerror}") from None
    if not original.is_file():
        raise DataError(f"{original}: expected a file, got a directory or the like")
    return about.st_size, about.st_mtime_ns


def transfer(original: Path, copy: int, size: int, changed: int, progress: Progress) -> None:
    """Copy all bytes, to the disk. Raises: DataError, where the original is to blame; OSError, where the copy is."""
    block = memoryview(bytearray(min(BLOCK, max(1, size))))
    done = number = 0
    try:
        source = original.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"{original}: expected a file that can be read, got: {error.strerror}") from None
    with source:
        while done <= size:
            try:
                got = source.readinto(block)
            except OSError as error:
                raise DataError(f"{original}: expected a file that can be read, got: {error.strerror}") from None
            if not got:
                break
            written = 0
            while written < got:
                written += os.write(copy, block[written:got])
            done += got
            number += 1
            if number % SYNC == 0:
                os.fdatasync(copy)
            progress(done)
    if done != size or look_at(original) != (size, changed):
        raise DataError(f"{original}: expected a file that stays as it is while it is copied, got one that was changed")
    os.fsync(copy)
    os.utime(copy, ns=(time.time_ns(), changed))


def open_to_lock(path: Path, flags: int = 0) -> int:
    """A file that may be another user's. Some network file systems want it writable to lock it."""
    try:
        return os.open(path, os.O_RDWR | flags, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY)


def try_lock(file: int) -> bool:
    """Whether nobody else holds a file's lock: it is ours then."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_unlocked(path: Path) -> bool:
    """Whether the process that held a file's lock has ended."""
    file = open_to_lock(path)
    try:
        return try_lock(file)
    finally:
        os.close(file)
