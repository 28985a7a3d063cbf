"""From sequences to padded batches, read ahead in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import numpy

from hvdtrain.data.types import Array, Batch, Dataset, Padded, Stream

T = TypeVar("T")


def batches(dataset: Dataset, share: Iterable[Array]) -> Iterator[Batch]:
    """The batches of one rank's share of a plan, each read when it is asked for. Raises: DataError."""
    at_once = getattr(dataset, "padded", None)
    for indices in share:
        seq_tags = partial(dataset.tags, indices.tolist())
        if at_once is not None:
            yield Batch(at_once(indices), indices, seq_tags)
        else:
            sequences = [dataset.sequence(index) for index in indices.tolist()]
            yield Batch({key: pad([sequence[key] for sequence in sequences]) for key in dataset.streams}, indices, seq_tags)


def pad(sequences: Sequence[Array]) -> Padded:
    """Arrays of shape (time, ...) that differ in time only, as one array of shape (batch, time, ...) with zeros behind."""
    seq_lens = numpy.fromiter((len(sequence) for sequence in sequences), dtype=numpy.int32, count=len(sequences))
    first = sequences[0]
    values = numpy.zeros((len(sequences), int(seq_lens.max()), *first.shape[1:]), dtype=first.dtype)
    if first.dtype == object:
        values[:] = ""  # strings
    for row, sequence in zip(values, sequences, strict=True):
        row[: len(sequence)] = sequence
    return Padded(values, seq_lens)


class ReadAhead(Generic[T]):
    """Takes values from an iterator in a background thread, some ahead of who asks for them; a context manager.

    An exception of the iterator is raised where the value would have come. Leaving the context stops the thread.
    """

    def __init__(self, values: Iterable[T], depth: int = 8) -> None:
        self._values = values
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
        while True:
            kind, value = self._ready.get()
            if kind == "error":
                raise value  # type: ignore[misc]  # it is a BaseException
            if kind == "end":
                return
            yield value  # type: ignore[misc]  # it is a T


def padded(dataset: Dataset, indices: Array) -> dict[str, Padded]:
    """The batch of some sequences, by the dataset's own way of making one where it has any. Raises: DataError."""
    at_once = getattr(dataset, "padded", None)
    if at_once is not None:
        return at_once(indices)  # type: ignore[no-any-return]  # the contract says so
    sequences = [dataset.sequence(index) for index in indices.tolist()]
    return {key: pad([sequence[key] for sequence in sequences]) for key in dataset.streams}


def sequences(dataset: Dataset, indices: Sequence[int]) -> list[dict[str, Array]]:
    """Some sequences, by the dataset's own way of giving several where it has any. Raises: DataError."""
    several = getattr(dataset, "sequences", None)
    if several is not None:
        return several(indices)  # type: ignore[no-any-return]  # the contract says so
    return [dataset.sequence(index) for index in indices]


def merged(streams: Mapping[str, Stream], size: int, parts: Sequence[tuple[Array, Mapping[str, Padded]]]) -> dict[str, Padded]:
    """One batch of several: each part comes with the rows it is to have. Where a part lacks a data key, its rows are empty."""
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
