"""Sequences of different lengths as one padded array, and several batches as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from hvdtrain.data.types import Array, Padded, Stream, UnlikeError


def pad(sequences: Sequence[Array], named: Callable[[int], str] = "row {}".format) -> Padded:
    """Arrays of shape (time, ...) that differ in time only, as one array of shape (batch, time, ...), padded with zeros.

    Args:
        named: given the number of an array, what it is, for messages.

    Raises:
        UnlikeError: they differ in the shape of a frame, or in the kind of numbers: numpy would repeat, round or cut them.
    """
    seq_lens = numpy.fromiter((len(sequence) for sequence in sequences), dtype=numpy.int32, count=len(sequences))
    first = sequences[0]
    dtype = first.dtype.newbyteorder("=")  # frameworks have tensors of this machine's byte order only
    values = numpy.zeros((len(sequences), int(seq_lens.max()), *first.shape[1:]), dtype=dtype)
    if first.dtype == object:
        values[:] = ""  # strings
    for number, (row, sequence) in enumerate(zip(values, sequences, strict=True)):
        if sequence.shape[1:] != first.shape[1:] or (sequence.dtype != first.dtype and not _holds(first.dtype, sequence)):
            raise UnlikeError(
                f"{named(number)}: expected {first.dtype} of shape {first.shape[1:]} in every frame, as the first one of the "
                f"batch has ({named(0)}), got {sequence.dtype} of shape {sequence.shape[1:]}"
            )
        row[: len(sequence)] = sequence
    return Padded(values, seq_lens)


def _holds(dtype: numpy.dtype[Any], values: Array) -> bool:
    """Whether an array of this type can have these values, up to the rounding of floating-point numbers."""
    if not numpy.can_cast(values.dtype, dtype, "same_kind"):
        return False
    return dtype.kind not in "iu" or numpy.array_equal(values.astype(dtype), values)


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
