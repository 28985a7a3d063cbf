"""Which files are open: few at a time, and for one thread at a time."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

MOST_OPEN = 64


class Opened(ExitStack):
    """A file with the files that hold parts of its virtual datasets, all open, and those of its members that were read.

    HDF5 keeps the chunks that it has decompressed as long as their dataset is open.
    """

    handle: Any

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[str, Any] = {}

    def member(self, name: str) -> Any:
        """A dataset of the file."""
        if name not in self.members:
            self.members[name] = self.handle[name]
        return self.members[name]


class File(Protocol):
    """What can be opened."""

    def open(self) -> Opened:
        """The file, open. Raises: DataError."""
        ...


class Handles:
    """The files of a dataset that this process has open, at most `most` at a time.

    Handles of h5py do not survive a fork: a new process opens its files anew.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most or MOST_OPEN
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._open: OrderedDict[int, Opened] = OrderedDict()  # by id, so that files without a user are closed at once

    @property
    def num_open(self) -> int:
        """The number of files that are open now."""
        return len(self._open)

    @contextmanager
    def use(self, file: File) -> Iterator[Opened]:
        """An open file, which no other thread closes inside the `with` block. Raises: DataError."""
        if self._process != os.getpid():
            for inherited in self._open.values():
                inherited.pop_all()
            Handles.__init__(self, self.most)
        with self._lock:
            if id(file) not in self._open:
                while len(self._open) >= self.most:
                    self._open.popitem(last=False)[1].close()
                self._open[id(file)] = file.open()
            self._open.move_to_end(id(file))
            yield self._open[id(file)]

    def close(self, file: File) -> None:
        if self._process == os.getpid():
            with self._lock, suppress(KeyError):
                self._open.pop(id(file)).close()
