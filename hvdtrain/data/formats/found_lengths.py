"""Files that keep the lengths of sequences that only reading the data tells, with what identifies their source."""

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
"""Of the files; another number: they are made anew."""

HEAD_START = 0.5
"""Seconds by which rank 0, which shows the progress, is ahead of the others."""


@dataclass(frozen=True)
class About:
    """What is known of a source once it was read for the first time.

    Attributes:
        name: of the dataset, for messages.
        streams: by data key, what a sequence's array holds.
        by_corpus: whether the lengths are those of the sequences of a corpus, of which each epoch tells its order in advance;
            otherwise every epoch is read to find its lengths.
        skips: whether a sequence can be read without those before it.
        repeats: whether an epoch that begins again gives the same sequences.
    """

    name: str
    streams: Mapping[str, Stream]
    by_corpus: bool
    skips: bool
    repeats: bool


@dataclass(frozen=True)
class Found:
    """Sequences: of an epoch, or of a whole corpus.

    Attributes:
        tags: as UTF-8; numpy bytes of shape (num_sequences,).
        lengths: by data key, the number of frames, int32 of shape (num_sequences,); -1: not known.
    """

    tags: Array
    lengths: Mapping[str, Array]

    def at(self, indices: Array) -> Found:
        """Some of the sequences, in the order of the indices."""
        return Found(self.tags[indices], {key: column[indices] for key, column in self.lengths.items()})

    @property
    def complete(self) -> bool:
        """Whether all lengths are known."""
        return all(bool((column >= 0).all()) for column in self.lengths.values())


class LengthsFile:
    """The files of one source in a folder that several jobs may share. Each is replaced as a whole.

    Args:
        folder: None: nothing is kept.
        identity: what identifies the source. It is in the file, too; the name is a hash of it.
    """

    def __init__(self, folder: Path | None, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        self._name = hashlib.sha256(identity.encode("utf-8")).hexdigest()[:20]

    def path(self, part: str) -> Path | None:
        """The file of a part: 'corpus', or 'epoch-N'."""
        return None if self._folder is None else self._folder / f"{self._name}.{part}.npz"

    def load(self, part: str) -> tuple[About, Found] | None:
        """What was saved; None, if there is none, or it is of another source or format."""
        path = self.path(part)
        if path is None:
            return None
        try:
            with numpy.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about["format"] != FORMAT or about["identity"] != self._identity:
                    return None
                lengths = {key: file[f"lengths/{key}"] for key in about["streams"]}
                return _about(about), Found(file["tags"], lengths)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
            return None

    def save(self, part: str, about: About, found: Found) -> str | None:
        """Write the file whole or not at all; the reason, if it cannot be written."""
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
            waiting: called now and then meanwhile.
            delay: seconds for which to leave the lock to others.
        """
        time.sleep(delay)
        path = None if self._folder is None else self._folder / f"{self._name}.lock"
        lock = -1
        if path is not None:
            with suppress(OSError):  # the folder cannot be written to: everyone reads the data
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


def _as_json(about: About) -> dict[str, Any]:
    streams = {
        key: [stream.dtype.str, list(stream.shape), stream.dim, stream.sparse, list(stream.labels)]
        for key, stream in about.streams.items()
    }
    return {"name": about.name, "streams": streams, "flags": [about.by_corpus, about.skips, about.repeats]}


def _about(read: Mapping[str, Any]) -> About:
    streams = {
        key: Stream(numpy.dtype(dtype), tuple(shape), dim, sparse, tuple(labels))
        for key, (dtype, shape, dim, sparse, labels) in read["streams"].items()
    }
    return About(read["name"], streams, *read["flags"])


def identity_of(value: Any) -> str:
    """A text that differs where a value of a config does: of functions their code and what they enclose, of the names of files
    their sizes and times of change.

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
        made_of = "" if code is None else f" {_code(code)} {_enclosed(value)}"
        owner = getattr(value, "__objclass__", type(value))  # a method of a built-in class has no module of its own
        module = getattr(value, "__module__", None) or owner.__module__
        return f"{module}.{value.__qualname__}{made_of}"
    text = re.sub(r"0x[0-9a-f]+", "0x", repr(value))
    return text if type(value).__module__ == "builtins" else f"{type(value).__qualname__} {text} {_members(value)}"


def _code(code: CodeType) -> str:
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode("utf-8")).hexdigest()[:16]


def _enclosed(function: Any) -> str:
    cells = [cell.cell_contents for cell in function.__closure__ or () if not callable(cell.cell_contents)]
    return identity_of([function.__defaults__, function.__kwdefaults__, cells])


def _members(value: Any) -> str:
    simple = (str, int, float, bool, type(None))
    return repr(sorted((name, each) for name, each in getattr(value, "__dict__", {}).items() if isinstance(each, simple)))
