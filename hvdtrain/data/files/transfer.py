"""Copying the bytes of a file, and the file locks by which processes coordinate."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.errors import DataError

BLOCK = 8 << 20
"""The number of bytes read and written at once."""

SYNC = 32
"""The number of blocks after which data is flushed to the disk, so that the last flush does not take minutes without progress."""

Progress = Callable[[int], None]
"""Called with a number of bytes that changes while copying makes progress, in this process or in the one that it waits for."""


def look_at(original: Path) -> tuple[int, int]:
    """Size in bytes, and modification time in nanoseconds. Raises: DataError."""
    try:
        about = original.stat()
    except OSError as error:
        raise DataError(f"{original}: expected a file, got: {error.strerror}") from None
    if not original.is_file():
        raise DataError(f"{original}: expected a file, got a directory or the like")
    return about.st_size, about.st_mtime_ns


def transfer(original: Path, copy: int, size: int, changed: int, progress: Progress) -> None:
    """Copy all bytes and flush them to the disk.

    Args:
        copy: file descriptor of the copy.
        size: of the original in bytes.
        changed: modification time of the original in nanoseconds.

    Raises:
        DataError: the original cannot be read, or was changed meanwhile.
        OSError: the copy cannot be written.
    """
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
        raise DataError(f"{original}: expected a file that does not change while it is copied, got one that was changed")
    os.fsync(copy)
    os.utime(copy, ns=(time.time_ns(), changed))


def open_to_lock(path: Path, flags: int = 0) -> int:
    """Open a file, possibly of another user, to lock it. Some network file systems need it to be writable for that."""
    try:
        return os.open(path, os.O_RDWR | flags, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY)


def try_lock(file: int) -> bool:
    """Take the lock of a file, unless another process holds it; whether that succeeded."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_unlocked(path: Path) -> bool:
    """Whether no process holds the lock of a file."""
    file = open_to_lock(path)
    try:
        return try_lock(file)
    finally:
        os.close(file)
