"""The files to be copied: those on a disk, and what the copying asks of others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hvdtrain.errors import DataError

BYTES_AT_ONCE = 8 << 20
"""The number of bytes read and written at once."""

SYNC = 32
"""The number of blocks after which data is flushed to the disk, so that the last flush does not take minutes without progress."""

Progress = Callable[[int], None]
"""Called with the number of bytes copied so far, by this process or by the one that it waits for."""


@dataclass(frozen=True)
class LocalFile:
    """A file on a disk or a network file system, to be copied."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    @property
    def origin(self) -> str:
        """What distinguishes it from other files, for the name of its copy."""
        return str(self.path.resolve())

    def size_and_version(self) -> tuple[int, int]:
        """Size in bytes, and modification time in nanoseconds. Raises: DataError."""
        try:
            about = self.path.stat()
        except OSError as error:
            raise DataError(f"{self}: expected a file, got: {error.strerror}") from None
        if not self.path.is_file():
            raise DataError(f"{self}: expected a file, got a directory or the like")
        return about.st_size, about.st_mtime_ns

    def transfer(self, copy: int, size: int, version: int, progress: Progress) -> None:
        """Copy all bytes and flush them to the disk.

        Args:
            copy: file descriptor of the copy.
            size, version: of the original, as found before.

        Raises:
            DataError: the original cannot be read, or changed during the copy.
            OSError: the copy cannot be written.
        """
        block = memoryview(bytearray(min(BYTES_AT_ONCE, max(1, size))))
        done = number = 0
        try:
            source = self.path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{self}: expected a file that can be read, got: {error.strerror}") from None
        with source:
            while done <= size:
                try:
                    got = source.readinto(block)
                except OSError as error:
                    raise DataError(f"{self}: expected a file that can be read, got: {error.strerror}") from None
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
        if done != size or self.size_and_version() != (size, version):
            raise DataError(f"{self}: expected a file that does not change while it is copied, got one that was changed")
        os.fsync(copy)
        os.utime(copy, ns=(time.time_ns(), version))


class RemoteFile(Protocol):
    """A file to be copied, like a `LocalFile`."""

    @property
    def name(self) -> str: ...

    @property
    def origin(self) -> str: ...

    def size_and_version(self) -> tuple[int, int]: ...

    def transfer(self, copy: int, size: int, version: int, progress: Progress) -> None: ...
