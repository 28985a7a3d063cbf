"""Noticing that another process replaced or changed the files that are read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.errors import DataError

Identity = tuple[int, int, int, int]


def identity(about: os.stat_result) -> Identity:
    """What is another after a file was replaced or written to."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def check_same(path: Path, before: Identity, now: Identity) -> None:
    """Raises: DataError, if a file is another than it was."""
    if before == now:
        return
    if before[:2] != now[:2]:
        what = "another one in its place"
    elif before[2] != now[2]:
        what = f"{now[2]} bytes instead of {before[2]}"
    else:
        changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now[3] / 1e9))
        what = f"one that was written to at {changed}"
    raise DataError(
        f"{path}: expected the file that was opened at the start, got {what} "
        "(write new data to a new name; training can be started again from the last checkpoint)"
    )


class Unchanged:
    """Files as they were when this was made.

    A mapped file that another took the place of (by renaming) can still be read as it was; one that is written to gives
    what is written, and one that is shortened ends the process when what is missing is read (SIGBUS).
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._before = {path: found for path in dict.fromkeys(paths) if (found := _found(path)) is not None}

    def check(self) -> None:
        """Raises: DataError, if one of the files is another than it was."""
        for path, before in self._before.items():
            now = _found(path)
            if now is None:
                raise DataError(f"{path}: expected the file that was opened at the start, got: no such file")
            check_same(Path(path), before, now)


def _found(path: str) -> Identity | None:
    try:
        return identity(os.stat(path))
    except OSError:  # who opens it has a better message
        return None
