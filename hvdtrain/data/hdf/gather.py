"""Gathering sequences from memory-mapped arrays into a batch, at about the speed of copying memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hvdtrain.data.types import Array

SHORT = 512
"""Sequences of up to this many bytes are gathered frame by frame in one operation; longer ones are copied one by one."""

REUSED = 1 << 16
"""Bytes from which on memory is reused; numpy itself is fast for smaller batches."""

KEPT = 4
"""The maximal number of free pieces of memory that are kept for the next batches."""


class Memory:
    """Memory for batches, which is reused when the last array on it is gone.

    The system provides new memory of the size of a batch page by page, which takes longer than filling it.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def empty(self, shape: tuple[int, ...], dtype: numpy.dtype[Any]) -> Array:
        """An uninitialized array."""
        size = math.prod(shape) * dtype.itemsize
        if size < REUSED:
            return numpy.empty(shape, dtype)
        try:
            piece = self._free.pop()
        except IndexError:  # the list is empty; checking first would be a race between threads
            piece = bytearray()
        if len(piece) < size:
            piece = bytearray(size + size // 4)  # room for a slightly larger batch
        # Every view holds a reference to `root`, which is directly on memory that numpy does not own.
        root = numpy.frombuffer(piece, numpy.uint8, size)
        weakref.finalize(root, self._give_back, piece).atexit = False
        return root.view(dtype).reshape(shape)

    def _give_back(self, piece: bytearray) -> None:
        if len(self._free) < KEPT:
            self._free.append(piece)


@dataclass(frozen=True)
class Part:
    """The rows of a batch that come from one array, and their first frames in it; both int64 of shape (number of rows,)."""

    array: Array
    rows: Array
    starts: Array


def gather(parts: Sequence[Part], lengths: Array, memory: Memory) -> Array:
    """A batch of sequences from one array, or from several with the same dtype and shape of frames.

    Args:
        lengths: number of frames of every row.

    Returns:
        shape (rows, longest, ...), zero after the end of each row.
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
    """Gather all frames at once, without a Python loop over sequences."""
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
    """The frames at some positions; beyond the last frame, the last one."""
    if not len(array):
        return numpy.zeros((*places.shape, *array.shape[1:]), array.dtype)
    if array.flags.aligned:
        return array.take(places, axis=0, mode="clip")
    # HDF5 does not align what it stores; `take` would copy the whole array first.
    found: Array = array[numpy.minimum(places, len(array) - 1)]
    return found
