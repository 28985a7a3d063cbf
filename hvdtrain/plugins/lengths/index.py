"""What is kept about a source of data, so that the next start need not find it again: lengths, tags, places in files.

A folder (`lengths_dir`) that jobs may share has files of one format, each written whole or not at all:

    8 bytes         the size of the header
    header          JSON: format, fingerprint of the source, what is known of it, and type, shape and place of every array
    arrays          each at a multiple of 64 bytes

Of several processes, one finds what is to be kept while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.dataset import Scanning
from hvdtrain.data.types import Array
from hvdtrain.disk.atomic import atomically

FORMAT = 2
"""Version of the files; those with another one are written anew."""

HEAD_START = 0.5
"""Seconds by which rank 0, which shows the progress, starts before the others."""

ALIGNMENT = 64

UNUSED = 90 * 24 * 3600.0
"""Seconds without use after which a file is removed."""

OURS = re.compile(r"[0-9a-f]{20}\.[\w.-]+")

Stored = tuple[dict[str, Any], dict[str, Array]]
"""What is known of a source, as JSON can hold it, and arrays by name."""


class IndexFile:
    """The files of one source in a folder.

    Args:
        folder: None: nothing is kept.
        fingerprint: of the source.
    """

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        self._folder = folder
        self._was_noted = False  # that nothing can be kept
        self._fingerprint = hashlib.sha256(fingerprint.encode("utf-8", "surrogateescape")).hexdigest()

    def path(self, name: str) -> Path | None:
        """The file of what is kept under a name, such as 'lengths' or 'epoch-3'."""
        return None if self._folder is None else self._folder / f"{self._fingerprint[:20]}.{name}.index"

    def get(self, name: str, scanning: Scanning, make: Callable[[], Stored], line: str = "", mapped: bool = False) -> Stored:
        """What is kept, or what `make` finds, which is kept then.

        Args:
            line: of the log if it cannot be kept, such as 'train: the lengths are counted'; rank 0 then begins. '': none.
            mapped: whether to map the arrays into memory, which the processes of a host then share, but which cannot be changed.
        """
        if (stored := self.load(name, mapped)) is not None:
            return stored
        with self.turn(scanning.waiting, HEAD_START if line and self._folder is not None and scanning.rank else 0.0):
            if (stored := self.load(name, mapped)) is not None:  # another process kept it meanwhile
                return stored
            content = make()
            reason = self.save(name, *content)
        if reason is not None and line and not self._was_noted:
            self._was_noted = True
            scanning.note(f"{line} in every run, as they cannot be kept: {reason} (lengths_dir)")
        return content

    def load(self, name: str, mapped: bool = False) -> Stored | None:
        """What is kept; None: nothing, or of another source or format."""
        path = self.path(name)
        if path is None:
            return None
        try:
            content: Array = numpy.memmap(path, numpy.uint8, "r") if mapped else numpy.fromfile(path, numpy.uint8)
            size = int.from_bytes(content[:8].tobytes(), "little")
            header = json.loads(content[8 : 8 + size].tobytes())
            if header["format"] != FORMAT or header["fingerprint"] != self._fingerprint:
                return None
            arrays = {}
            place = _aligned(8 + size)
            for key, dtype, shape, number in header["arrays"]:
                arrays[key] = content[place : place + number].view(numpy.ndarray).view(dtype).reshape(shape)
                place = _aligned(place + number)
            with suppress(OSError):  # of another user: it counts as used by that one
                os.utime(path)
            return header["about"], arrays
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, name: str, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> str | None:
        """Keep something. Returns the reason if that is impossible."""
        path = self.path(name)
        if path is None:
            return None
        stored = {
            key: numpy.ascontiguousarray(values if values.itemsize else values.astype("S1")) for key, values in arrays.items()
        }
        header = json.dumps(
            {
                "format": FORMAT,
                "fingerprint": self._fingerprint,
                "about": about,
                "arrays": [[key, values.dtype.str, values.shape, values.nbytes] for key, values in stored.items()],
            }
        ).encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomically(path, has_peers=True) as unfinished, unfinished.open("wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                for values in stored.values():
                    file.write(bytes(_aligned(file.tell()) - file.tell()))
                    file.write(values.reshape(-1).view(numpy.uint8).data)
        except OSError as error:
            return f"{path}: {error.strerror}"
        return None

    @contextmanager
    def turn(self, waiting: Callable[[], None], delay: float = 0.0) -> Iterator[None]:
        """Hold the lock of the files inside the `with` block: of several processes, one reads the data and the others wait.

        Args:
            waiting: called now and then while the lock is not available.
            delay: seconds to wait first, so that others get the lock.
        """
        time.sleep(delay)
        path = None if self._folder is None else self._folder / f"{self._fingerprint[:20]}.lock"
        lock = -1
        if path is not None:
            with suppress(OSError):  # the folder cannot be written to: every process reads the data
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                os.utime(lock)
        try:
            while lock >= 0:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waiting()
                    time.sleep(0.1)
                except OSError:  # a file system without locks
                    break
            yield
        finally:
            if lock >= 0:
                os.close(lock)
        if path is not None:
            _remove_unused(path.parent)


@cache
def _remove_unused(folder: Path) -> None:
    """Once per process."""
    with suppress(OSError):
        for path in folder.iterdir():
            if OURS.fullmatch(path.name):
                with suppress(OSError):
                    if path.stat().st_mtime < time.time() - UNUSED:
                        path.unlink()


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT
