"""Sequences of different lengths as one padded array, and several batches as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from hvdtrain.data.types import Array, Packed, Padded, Stream, UnlikeError


def pad(sequences: Sequence[Array], describe: Callable[[int], str] = "row {}".format) -> Padded:
    """Arrays of shape (time, ...) that differ in time only, as one array of shape (batch, time, ...), padded with zeros.

    Args:
        describe: the name of an array for messages, given its number.

    Raises:
        UnlikeError: the shapes of frames or the kinds of numbers differ: numpy would repeat, round or cut them.
    """
    seq_lens = _lengths_of(sequences)
    values = _empty((len(sequences), int(seq_lens.max())), sequences[0])
    for number, (row, sequence) in enumerate(zip(values, sequences, strict=True)):
        _check_like(sequences[0], sequence, number, describe)
        row[: len(sequence)] = sequence
    return Padded(values, seq_lens)


def pack(sequences: Sequence[Array], describe: Callable[[int], str] = "row {}".format) -> Packed:
    """Arrays of shape (time, ...) that differ in time only, one after the other, as one of shape (frames, ...). The rest is as in
    `pad`.
    """
    seq_lens = _lengths_of(sequences)
    values = _empty((int(seq_lens.sum(dtype=numpy.int64)),), sequences[0])
    end = 0
    for number, sequence in enumerate(sequences):
        _check_like(sequences[0], sequence, number, describe)
        end += len(sequence)
        values[end - len(sequence) : end] = sequence
    return Packed(values, seq_lens)


def join(sequences: Sequence[Array], describe: Callable[[int], str] = "part {}".format) -> Padded:
    """Arrays of shape (time, ...) one after the other, as one row of shape (1, frames, ...). The rest is as in `pad`."""
    values = pack(sequences, describe).values[None]
    return Padded(values, numpy.array([values.shape[1]], dtype=numpy.int32))


def same_values(one: Array, other: Array) -> bool:
    """Whether two arrays are equal; NaN equals NaN."""
    return numpy.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def _lengths_of(sequences: Sequence[Array]) -> Array:
    return numpy.fromiter((len(sequence) for sequence in sequences), dtype=numpy.int32, count=len(sequences))


def _empty(shape: tuple[int, ...], like: Array) -> Array:
    """Zeros, or empty strings, for frames like those of an array."""
    dtype = like.dtype.newbyteorder("=")  # frameworks only have tensors in this machine's byte order
    values = numpy.zeros((*shape, *like.shape[1:]), dtype=dtype)
    if like.dtype == object:
        values[:] = ""  # strings
    return values


def _check_like(first: Array, other: Array, number: int, describe: Callable[[int], str]) -> None:
    """Raises: UnlikeError, if the frames of two arrays do not fit into one."""
    if other.shape[1:] != first.shape[1:] or (other.dtype != first.dtype and not _holds(first.dtype, other)):
        raise UnlikeError(
            f"{describe(number)}: expected {first.dtype} of shape {first.shape[1:]} in every frame, as the first one of the "
            f"batch has ({describe(0)}), got {other.dtype} of shape {other.shape[1:]}"
        )


def _holds(dtype: numpy.dtype[Any], values: Array) -> bool:
    """Whether an array of this type can hold these values, up to rounding of floating-point numbers."""
    if not numpy.can_cast(values.dtype, dtype, "same_kind"):
        return False
    return dtype.kind not in "iu" or numpy.array_equal(values.astype(dtype), values)


def merge_batches(
    streams: Mapping[str, Stream], size: int, parts: Sequence[tuple[Array, Mapping[str, Padded]]]
) -> dict[str, Padded]:
    """One batch made of several, each given with its rows in the whole. Rows are empty in data keys missing from their part."""
    return {
        name: _merge(stream, size, [(rows, part[name]) for rows, part in parts if name in part])
        for name, stream in streams.items()
    }


def _merge(stream: Stream, size: int, parts: Sequence[tuple[Array, Padded]]) -> Padded:
    longest = max((part.values.shape[1] for _, part in parts), default=0)
    values = numpy.zeros((size, longest, *stream.shape), dtype=stream.dtype)
    if stream.dtype == object:
        values[:] = ""  # strings
    seq_lens = numpy.zeros(size, dtype=numpy.int32)
    for rows, part in parts:
        values[rows, : part.values.shape[1]] = part.values
        seq_lens[rows] = part.seq_lens
    return Padded(values, seq_lens)
