"""Files with the lengths of sequences that are only known from reading the data, and with the identity of their source."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import numpy

from hvdtrain.data.types import Array, Stream

FORMAT = 1
"""Version of the files; those with another one are written anew."""

HEAD_START = 0.5
"""Seconds by which rank 0, which shows the progress, starts before the others."""


@dataclass(frozen=True)
class SourceTraits:
    """Properties of a source, known once it was read for the first time.

    Attributes:
        name: of the dataset, for messages.
        streams: by data key, what a sequence's array holds.
        by_corpus: whether the lengths are those of a whole corpus, whose order in each epoch is known in advance; otherwise every
            epoch is read to find its lengths.
        skips: whether a sequence can be read without those before it.
        repeats: whether an epoch yields the same sequences when it begins again.
    """

    name: str
    streams: Mapping[str, Stream]
    by_corpus: bool
    skips: bool
    repeats: bool


@dataclass(frozen=True)
class SequenceTable:
    """The sequences of an epoch or of a whole corpus.

    Attributes:
        tags: as UTF-8; numpy bytes of shape (num_sequences,).
        lengths: by data key, the number of frames, int32 of shape (num_sequences,); -1: unknown.
    """

    tags: Array
    lengths: Mapping[str, Array]

    def select(self, indices: Array) -> SequenceTable:
        """Some of the sequences, in the order of the indices."""
        return SequenceTable(self.tags[indices], {key: column[indices] for key, column in self.lengths.items()})

    @property
    def is_complete(self) -> bool:
        """Whether all lengths are known."""
        return all(bool((column >= 0).all()) for column in self.lengths.values())


class LengthsFile:
    """The files of one source in a folder that several jobs may share. Each file is replaced as a whole.

    Args:
        folder: None: nothing is kept.
        identity: of the source. The file contains it; its name is a hash of it.
    """

    def __init__(self, folder: Path | None, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        self._name = hashlib.sha256(identity.encode("utf-8")).hexdigest()[:20]

    def path(self, part: str) -> Path | None:
        """The file of a part: 'corpus', or 'epoch-N'."""
        return None if self._folder is None else self._folder / f"{self._name}.{part}.npz"

    def load(self, part: str) -> tuple[SourceTraits, SequenceTable] | None:
        """The saved lengths; None if nothing was saved, or for another source or format."""
        path = self.path(part)
        if path is None:
            return None
        try:
            with numpy.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about["format"] != FORMAT or about["identity"] != self._identity:
                    return None
                lengths = {key: file[f"lengths/{key}"] for key in about["streams"]}
                return _from_json(about), SequenceTable(file["tags"], lengths)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
            return None

    def save(self, part: str, about: SourceTraits, found: SequenceTable) -> str | None:
        """Write the file whole or not at all. Returns the reason if it cannot be written."""
        path = self.path(part)
        if path is None:
            return None
        arrays: dict[str, Any] = {f"lengths/{key}": column for key, column in found.lengths.items()}
        text = json.dumps({"format": FORMAT, "identity": self._identity, **_as_json(about)})
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.new_tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                numpy.savez(file, about=numpy.array(text), tags=found.tags, **arrays)
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
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
        path = None if self._folder is None else self._folder / f"{self._name}.lock"
        lock = -1
        if path is not None:
            with suppress(OSError):  # the folder cannot be written to: every process reads the data
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
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


def _as_json(about: SourceTraits) -> dict[str, Any]:
    streams = {
        key: [stream.dtype.str, list(stream.shape), stream.dim, stream.sparse, list(stream.labels)]
        for key, stream in about.streams.items()
    }
    return {"name": about.name, "streams": streams, "flags": [about.by_corpus, about.skips, about.repeats]}


def _from_json(read: Mapping[str, Any]) -> SourceTraits:
    streams = {
        key: Stream(numpy.dtype(dtype), tuple(shape), dim, sparse, tuple(labels))
        for key, (dtype, shape, dim, sparse, labels) in read["streams"].items()
    }
    return SourceTraits(read["name"], streams, *read["flags"])


def identity_of(value: Any) -> str:
    """A text that differs if a value of a config does. It has the code and closures of functions, and the sizes and modification
    times of named files.

    >>> identity_of({"b": (1, None), "a": len, "c": list.__getitem__})
    "{'a': builtins.len, 'b': [1, None], 'c': builtins.list.__getitem__}"
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {identity_of(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(identity_of, value)) + "]"
    if isinstance(value, (str, os.PathLike)):
        with suppress(OSError, ValueError):
            about = os.stat(value)
            return f"{os.path.abspath(value)!r} ({about.st_size} bytes, {about.st_mtime_ns})"
        return repr(str(value))
    if isinstance(value, functools.partial):
        return f"partial({identity_of([value.func, value.args, value.keywords])})"
    if callable(value) and getattr(value, "__qualname__", None):
        code = getattr(value, "__code__", None)
        made_of = "" if code is None else f" {_code_hash(code)} {_closure_text(value)}"
        owner = getattr(value, "__objclass__", type(value))  # a method of a built-in class has no __module__
        module = getattr(value, "__module__", None) or owner.__module__
        return f"{module}.{value.__qualname__}{made_of}"
    text = re.sub(r"0x[0-9a-f]+", "0x", repr(value))
    return text if type(value).__module__ == "builtins" else f"{type(value).__qualname__} {text} {_attributes_text(value)}"


def _code_hash(code: CodeType) -> str:
    constants = [_code_hash(constant) if isinstance(constant, CodeType) else repr(constant) for constant in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode("utf-8")).hexdigest()[:16]


def _closure_text(function: Any) -> str:
    cells = [cell.cell_contents for cell in function.__closure__ or () if not callable(cell.cell_contents)]
    return identity_of([function.__defaults__, function.__kwdefaults__, cells])


def _attributes_text(value: Any) -> str:
    simple = (str, int, float, bool, type(None))
    return repr(sorted((name, member) for name, member in getattr(value, "__dict__", {}).items() if isinstance(member, simple)))
