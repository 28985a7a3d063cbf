"""Which files are open: few at a time. As of all that reads, one thread at a time uses them (`OneAtATime` in views.py)."""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import ExitStack
from typing import Any, Protocol

from hvdtrain.data.files import why_not_opened

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
        """The file, open. Raises: DataError; OSError, of files that may wait until fewer are open."""
        ...


class Handles:
    """The files of a dataset that this process has open, at most `most` at a time.

    Handles of h5py do not survive a fork: a new process opens its files anew.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most or MOST_OPEN
        self._process = os.getpid()
        self._open: OrderedDict[int, Opened] = OrderedDict()  # by id, so that files without a user are closed at once

    def opened(self, file: File) -> Opened:
        """A file, open until others take its place. Raises: DataError."""
        if self._process != os.getpid():
            for inherited in self._open.values():
                inherited.pop_all()
            Handles.__init__(self, self.most)
        while id(file) not in self._open:
            while len(self._open) >= self.most:
                self._open.popitem(last=False)[1].close()
            try:
                self._open[id(file)] = file.open()
            except OSError as error:
                if not why_not_opened(error) or not self._open:
                    raise
                self._open.popitem(last=False)[1].close()  # a process may open fewer files
        self._open.move_to_end(id(file))
        return self._open[id(file)]

    def close(self, file: File) -> None:
        if self._process == os.getpid() and id(file) in self._open:
            self._open.pop(id(file)).close()
