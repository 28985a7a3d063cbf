"""Detecting that another process replaced or changed the data files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.errors import DataError

Identity = tuple[int, int, int, int]


def identity(about: os.stat_result) -> Identity:
    """Numbers that change if a file is replaced or written to: device, inode, size, modification time."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def check_same(path: Path, before: Identity, now: Identity) -> None:
    """Raises: DataError, if a file was replaced or changed."""
    if before == now:
        return
    if before[:2] != now[:2]:
        what = "another file in its place"
    elif before[2] != now[2]:
        what = f"one of {now[2]} bytes instead of {before[2]}"
    else:
        changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now[3] / 1e9))
        what = f"one that was modified at {changed}"
    raise DataError(
        f"{path}: expected the file that was opened at the start, got {what} "
        "(write new data to a new file; training can be resumed from the last checkpoint)"
    )


class Unchanged:
    """Remembers the identity of files, to detect later that one has changed.

    A memory-mapped file that was replaced (by renaming) can still be read; one that is written to gives the new data, and one
    that is truncated ends the process when the missing part is read (SIGBUS).
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._before = {path: found for path in dict.fromkeys(paths) if (found := _found(path)) is not None}

    def check(self) -> None:
        """Raises: DataError, if one of the files was replaced or changed."""
        for path, before in self._before.items():
            now = _found(path)
            if now is None:
                raise DataError(f"{path}: expected the file that was opened at the start, got: no such file")
            check_same(Path(path), before, now)


def _found(path: str) -> Identity | None:
    try:
        return identity(os.stat(path))
    except OSError:  # opening it gives a better message
        return None
