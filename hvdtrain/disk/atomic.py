"""Files that are complete or as they were before: what is written gets its name last."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".unfinished"
"""The end of the name of a file that is being written."""


def write_atomically(file: Path, content: str | bytes, *, has_peers: bool = False, flush: bool = False) -> None:
    """Write a file (text in UTF-8), or replace it. Raises: OSError.

    Args:
        has_peers, flush: as of `atomically`.
    """
    with atomically(file, has_peers=has_peers, flush=flush) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomically(file: Path, *, has_peers: bool = False, flush: bool = False) -> Iterator[Path]:
    """Yield the path at which to write a new version of a file; at the end of the block it gets the file's name. Raises: OSError.

    Args:
        has_peers: whether other processes may write it at the same time, also on other hosts, where they may have the same id.
        flush: whether the content is to reach the disk first.
    """
    writer = f".{socket.gethostname()}-{os.getpid()}" if has_peers else ""
    unfinished = file.with_name(f"{file.name}{writer}{UNFINISHED}")
    try:
        yield unfinished
        if flush:
            flush_to_disk(unfinished)
        os.replace(unfinished, file)
    except BaseException:
        with suppress(OSError):
            remove_path(unfinished)
        raise


def remove_path(path: Path) -> None:
    """Remove a file, if it exists, or a folder with its contents. Raises: OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk: a rename must not get there before the contents. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
