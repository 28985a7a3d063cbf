"""Sequences picked out of one long array into a batch, at about the speed at which memory is copied."""

from __future__ import annotations

import math
import weakref
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


def gather(array: Array, starts: Array, lengths: Array, memory: Memory) -> Array:
    """Parts of an array that begin at `starts` and have `lengths` frames: shape (number, longest, ...), zero behind each end."""
    longest = int(lengths.max())
    if longest * array.dtype.itemsize * math.prod(array.shape[1:]) <= SHORT and len(array):
        return _by_frames(array, starts, lengths, longest)
    values = memory.empty((len(starts), longest, *array.shape[1:]), array.dtype)
    for row, start, length in zip(values, starts.tolist(), lengths.tolist(), strict=True):
        row[:length] = array[start : start + length]
        row[length:] = 0
    return values


def _by_frames(array: Array, starts: Array, lengths: Array, longest: int) -> Array:
    """All frames at once: no Python for each sequence."""
    frames = numpy.arange(longest)
    places = starts[:, None] + frames
    numpy.minimum(places, len(array) - 1, out=places)  # behind the last sequence there is nothing to take
    # HDF5 does not align what it stores; `take` would copy the whole array first.
    values: Array = array.take(places, axis=0) if array.flags.aligned else array[places]
    values[frames >= lengths[:, None]] = 0
    return values
