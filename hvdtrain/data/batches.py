"""Padding sequences to batches, and reading batches ahead in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import numpy

from hvdtrain.data.types import Array, Padded, Stream

T = TypeVar("T")


def pad(sequences: Sequence[Array]) -> Padded:
    """Arrays of shape (time, ...) that differ in time only, as one array of shape (batch, time, ...), padded with zeros."""
    seq_lens = numpy.fromiter((len(sequence) for sequence in sequences), dtype=numpy.int32, count=len(sequences))
    first = sequences[0]
    values = numpy.zeros((len(sequences), int(seq_lens.max()), *first.shape[1:]), dtype=first.dtype)
    if first.dtype == object:
        values[:] = ""  # strings
    for row, sequence in zip(values, sequences, strict=True):
        row[: len(sequence)] = sequence
    return Padded(values, seq_lens)


def merged(streams: Mapping[str, Stream], size: int, parts: Sequence[tuple[Array, Mapping[str, Padded]]]) -> dict[str, Padded]:
    """One batch of several, each given with its rows in the whole. Rows of a part that lacks a data key are empty there."""
    return {
        name: _merged(stream, size, [(rows, part[name]) for rows, part in parts if name in part])
        for name, stream in streams.items()
    }


def _merged(stream: Stream, size: int, parts: Sequence[tuple[Array, Padded]]) -> Padded:
    longest = max((part.values.shape[1] for _, part in parts), default=0)
    values = numpy.zeros((size, longest, *stream.shape), dtype=stream.dtype)
    if stream.dtype == object:
        values[:] = ""  # strings
    seq_lens = numpy.zeros(size, dtype=numpy.int32)
    for rows, part in parts:
        values[rows, : part.values.shape[1]] = part.values
        seq_lens[rows] = part.seq_lens
    return Padded(values, seq_lens)


class ReadAhead(Generic[T]):
    """A context manager that reads ahead from an iterator in a background thread, up to `depth` values.

    An exception of the iterator is raised in place of the value. Leaving the context stops the thread.

    Args:
        begin: called with every value by the thread that takes them, one value ahead: for the next one before the present one is
            returned, if it has been read by then. It returns the value to use instead. None: values are returned as they are.
    """

    def __init__(self, values: Iterable[T], depth: int = 8, begin: Callable[[T], T] | None = None) -> None:
        self._values = values
        self._begin = begin
        self._ready: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="read-ahead", daemon=True)

    def __enter__(self) -> Iterator[T]:
        self._thread.start()
        return self._take()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        while self._thread.is_alive():  # the thread may be waiting for room
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def _fill(self) -> None:
        try:
            for value in self._values:
                self._ready.put(("value", value))
                if self._stop.is_set():
                    return
            self._ready.put(("end", None))
        except BaseException as error:
            self._ready.put(("error", error))

    def _take(self) -> Iterator[T]:
        ahead: tuple[str, T | BaseException | None] | None = None  # the next value, begun
        while True:
            kind, value = self._begun(self._ready.get()) if ahead is None else ahead
            if kind == "error":
                raise value  # type: ignore[misc]  # it is a BaseException
            if kind == "end":
                return
            ahead = None
            if self._begin is not None:
                with suppress(queue.Empty):
                    ahead = self._begun(self._ready.get_nowait())
            yield value  # type: ignore[misc]  # it is a T

    def _begun(self, entry: tuple[str, T | BaseException | None]) -> tuple[str, T | BaseException | None]:
        kind, value = entry
        if kind == "value" and self._begin is not None:
            return kind, self._begin(value)  # type: ignore[arg-type]  # it is a T
        return entry
