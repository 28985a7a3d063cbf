"""Batches that a thread reads ahead."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy

from hvdtrain.data.randomness import ALONE
from hvdtrain.data.types import Batch

T = TypeVar("T")

FEW = 8


class ReadAhead(Generic[T]):
    """A context manager that reads ahead from an iterator in a background thread.

    The thread reads until there are enough values, and then waits until half of them are used: for small values, switching
    between two threads takes longer than reading. An exception of the iterator is raised in place of the value. Leaving the
    context stops the thread.

    Args:
        depth: how many values like the given one to read ahead.
        begin: called with every value by the consuming thread, one value ahead: for the next value before the current one is
            returned, if it has been read by then. Returns the value to use instead. None: values are returned unchanged.
    """

    def __init__(
        self, values: Iterable[T], depth: Callable[[T], int] = lambda _: FEW, begin: Callable[[T], T] | None = None
    ) -> None:
        self._values = values
        self._begin = begin
        self._depth_of = depth
        self._depth = 0  # for the last value
        self._ready: queue.SimpleQueue[tuple[str, T | BaseException | None]] = queue.SimpleQueue()
        self._has_room = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="read-ahead", daemon=True)

    def __enter__(self) -> Iterator[T]:
        self._thread.start()
        return self._take()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._has_room.set()
        self._thread.join()

    def _fill(self) -> None:
        try:
            for value in self._values:
                self._depth = self._depth_of(value)
                self._ready.put(("value", value))
                if self._ready.qsize() >= self._depth:
                    self._wait_for_room()
                if self._stop.is_set():
                    return
            self._ready.put(("end", None))
        except BaseException as error:
            self._ready.put(("error", error))

    def _wait_for_room(self) -> None:
        self._has_room.clear()
        if not self._is_half_empty() and not self._stop.is_set():  # neither has become true just before
            self._has_room.wait()

    def _is_half_empty(self) -> bool:
        return self._ready.qsize() <= self._depth // 2

    def _take(self) -> Iterator[T]:
        ahead: tuple[str, T | BaseException | None] | None = None  # the next value, after `begin`
        while True:
            kind, value = self._begin_value(self._next()) if ahead is None else ahead
            if kind == "error":
                raise value  # type: ignore[misc]  # it is a BaseException
            if kind == "end":
                return
            ahead = None
            if self._begin is not None and not self._ready.empty():
                ahead = self._begin_value(self._next())
            yield value  # type: ignore[misc]  # it is a T

    def _next(self) -> tuple[str, T | BaseException | None]:
        """The next value; waits for it."""
        if self._ready.empty():
            with ALONE.while_waiting():
                entry = self._ready.get()
        else:
            entry = self._ready.get()
        if not self._has_room.is_set() and self._is_half_empty():
            self._has_room.set()
        return entry

    def _begin_value(self, entry: tuple[str, T | BaseException | None]) -> tuple[str, T | BaseException | None]:
        kind, value = entry
        if kind == "value" and self._begin is not None:
            return kind, self._begin(value)  # type: ignore[arg-type]  # it is a T
        return entry


MANY = 64

SMALL = 4 << 20
"""How many batches to read ahead: `MANY` if so many have less than `SMALL` bytes together, at least `FEW`. Small steps take a
fifth longer if the thread that reads is woken for every four batches instead of 32."""


def ahead_of(batch: Batch) -> int:
    """How many batches like this one to read ahead."""
    size = 1 + sum(size_of(padded.values) for padded in batch.data.values()) + size_of(batch.tree)
    return MANY if size * MANY <= SMALL else max(FEW, int(SMALL // size))


def size_of(value: Any) -> float:
    """The bytes of what is read: arrays, tensors, and what has them inside; infinite: they are not known.

    >>> size_of({"data": numpy.zeros((2, 3)), "text": "abc", "rows": [1, None]}), size_of({"image": object()})
    (67.0, inf)
    """
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return sum(map(size_of, value.ravel().tolist()))
    try:
        if isinstance(size := getattr(value, "nbytes", None), int):
            return size
    except Exception:  # of a sparse tensor, for example
        return math.inf
    if value is None or isinstance(value, (int, float, str, bytes)):
        return 8.0 if value is None or isinstance(value, (int, float)) else len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value))
    return sum(map(size_of, value.values())) if isinstance(value, Mapping) else math.inf


class Staging(Protocol):
    """How a learner prepares batches on their way from the reading thread to a step."""

    def pin(self, batch: Batch) -> Batch:
        """The batch in memory that a device can copy from by itself. Called by the reading thread."""
        ...

    def send(self, batch: Batch) -> Batch:
        """Start to copy a batch to the device. Called by the thread that trains, one batch ahead."""
        ...
