"""Sequences picked out of long arrays into a batch, at about the speed at which memory is copied."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hvdtrain.data.types import Array

SHORT = 512
"""Sequences of up to so many bytes are gathered frame by frame; longer ones are copied one by one, which is faster then."""

REUSED = 1 << 16
"""Bytes: smaller batches come from numpy, which has memory of that size at hand."""

KEPT = 4
"""Most pieces of free memory that are kept for the next batches."""


class Memory:
    """Memory for batches, used again when the last array on it is gone.

    Fresh memory of the size of a batch comes from the system page by page, which takes longer than filling it.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def empty(self, shape: tuple[int, ...], dtype: numpy.dtype[Any]) -> Array:
        """An array with anything in it."""
        size = math.prod(shape) * dtype.itemsize
        if size < REUSED:
            return numpy.empty(shape, dtype)
        try:
            piece = self._free.pop()
        except IndexError:  # of an empty list; asking first would be no help where threads share it
            piece = bytearray()
        if len(piece) < size:
            piece = bytearray(size + size // 4)  # room for a batch that is a bit larger
        # Every view, of whatever kind, holds on to the array that stands directly on memory that is not numpy's.
        root = numpy.frombuffer(piece, numpy.uint8, size)
        weakref.finalize(root, self._give_back, piece).atexit = False
        return root.view(dtype).reshape(shape)

    def _give_back(self, piece: bytearray) -> None:
        if len(self._free) < KEPT:
            self._free.append(piece)


@dataclass(frozen=True)
class Part:
    """The rows of a batch that come from one array, and where in it they begin; both int64 of shape (number of rows,)."""

    array: Array
    rows: Array
    starts: Array


def gather(parts: Sequence[Part], lengths: Array, memory: Memory) -> Array:
    """A batch of sequences that lie in one array or in several of the same kind.

    Args:
        lengths: number of frames of every row.

    Returns:
        shape (rows, longest, ...), zero behind each row's end.
    """
    longest = int(lengths.max())
    first = parts[0].array
    if longest * first.dtype.itemsize * math.prod(first.shape[1:]) <= SHORT:
        return _by_frames(parts, lengths, longest)
    values = memory.empty((len(lengths), longest, *first.shape[1:]), first.dtype)
    for part in parts:
        own = lengths[part.rows].tolist()
        for row, start, length in zip(part.rows.tolist(), part.starts.tolist(), own, strict=True):
            values[row, :length] = part.array[start : start + length]
            values[row, length:] = 0
    return values


def _by_frames(parts: Sequence[Part], lengths: Array, longest: int) -> Array:
    """All frames at once: no Python for each sequence."""
    frames = numpy.arange(longest)
    taken = [_taken(part.array, part.starts[:, None] + frames) for part in parts]
    values = taken[0]
    if len(parts) > 1:
        values = numpy.empty((len(lengths), *values.shape[1:]), values.dtype)
        for part, rows in zip(parts, taken, strict=True):
            values[part.rows] = rows
    values[frames >= lengths[:, None]] = 0
    return values


def _taken(array: Array, places: Array) -> Array:
    """The frames at some places; behind the last frame, where there is nothing to take, the last one."""
    if not len(array):
        return numpy.zeros((*places.shape, *array.shape[1:]), array.dtype)
    if array.flags.aligned:
        return array.take(places, axis=0, mode="clip")
    # HDF5 does not align what it stores; `take` would copy the whole array first.
    found: Array = array[numpy.minimum(places, len(array) - 1)]
    return found
