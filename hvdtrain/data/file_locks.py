"""Locks on files (flock), which the system takes back when their holder ends, however it does."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


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
