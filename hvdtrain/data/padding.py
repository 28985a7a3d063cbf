"""Sequences of different lengths as one padded array."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from hvdtrain.data.types import Array, Packed, Padded, Stream, UnlikeError

SHORT = 512
"""Sequences of up to this many bytes are gathered frame by frame in one operation; longer ones are copied one by one."""

REUSED = 1 << 16
"""Batches of at least this many bytes reuse memory; for smaller ones, numpy itself is fast."""

KEPT = 8
"""The maximal number of free pieces of memory kept for the next batches."""


class Memory:
    """Memory for batches, reused once no array refers to it: for arrays of at least half its size, as they may be kept.

    The system provides new memory of the size of a batch page by page, which takes longer than filling it.

    Any thread may take a piece, and give one back at any moment, as a lock or the garbage collector does: each step is a single
    operation of a dict, or of a copy.
    """

    def __init__(self) -> None:
        self._free: dict[int, bytearray] = {}  # by id, the oldest first

    def free(self) -> list[bytearray]:
        """The pieces that no array refers to, the oldest first."""
        return list(self._free.values())

    def empty(self, shape: tuple[int, ...], dtype: numpy.dtype[Any]) -> Array:
        size = math.prod(shape) * dtype.itemsize
        if size < REUSED:
            return numpy.empty(shape, dtype)
        fitting = (key for key, free in list(self._free.items()) if size <= len(free) <= 2 * size)
        pieces = (self._free.pop(key, None) for key in fitting)  # None: another thread was faster
        piece = next((free for free in pieces if free is not None), None)
        if piece is None:
            piece = bytearray(size + size // 4)  # room for a slightly larger batch
        # Every view refers to `root`, as numpy does not own the memory below it: `root` dies with the last view.
        root = numpy.frombuffer(piece, numpy.uint8, size)
        weakref.finalize(root, self._give_back, piece).atexit = False
        return root.view(dtype).reshape(shape)

    def _give_back(self, piece: bytearray) -> None:
        self._free[id(piece)] = piece
        for oldest in list(self._free)[:-KEPT]:
            self._free.pop(oldest, None)


MEMORY = Memory()


def pad(sequences: Sequence[Array], describe: Callable[[int], str] = "row {}".format) -> Padded:
    """Arrays of shape (time, ...) that differ in time only, as one array of shape (batch, time, ...), padded with zeros.

    Args:
        describe: the name of an array for messages, given its number.

    Raises:
        UnlikeError: the shapes of frames or the kinds of numbers differ: numpy would repeat, round or cut them.
    """
    first = sequences[0]
    lengths = list(map(len, sequences))
    values = _empty((len(sequences), max(lengths)), first)
    is_filled = values.nbytes < REUSED
    for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        if sequence.dtype != first.dtype or sequence.shape[1:] != first.shape[1:]:
            _check_like(first, sequence, number, describe)
        values[number, :length] = sequence
        if not is_filled:
            values[number, length:] = "" if values.dtype.kind in "OU" else 0
    return Padded(values, numpy.array(lengths, numpy.int32))


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


def same_values(first: Array, second: Array) -> bool:
    """Whether two arrays are equal; NaN equals NaN."""
    return numpy.array_equal(first, second, equal_nan=first.dtype.kind in "fc")


def _lengths_of(sequences: Sequence[Array]) -> Array:
    return numpy.fromiter((len(sequence) for sequence in sequences), dtype=numpy.int32, count=len(sequences))


def _empty(shape: tuple[int, ...], like: Array) -> Array:
    """An array for frames like those of another one. If it has less than `REUSED` bytes, all are zeros, or empty strings."""
    shape = (*shape, *like.shape[1:])  # as frameworks only have tensors in this byte order
    dtype = like.dtype.newbyteorder("=")
    if math.prod(shape) * dtype.itemsize < REUSED:
        return numpy.full(shape, "", dtype) if dtype.hasobject else numpy.zeros(shape, dtype)
    return numpy.empty(shape, dtype) if dtype.hasobject else MEMORY.empty(shape, dtype)


def _check_like(first: Array, array: Array, number: int, describe: Callable[[int], str]) -> None:
    """Raises: UnlikeError, if the frames of two arrays do not fit into one."""
    if array.shape[1:] != first.shape[1:] or (array.dtype != first.dtype and not holds(first.dtype, array)):
        raise UnlikeError(
            f"{describe(number)}: expected {first.dtype} of shape {first.shape[1:]} in every frame, as the first one of the "
            f"batch has ({describe(0)}), got {array.dtype} of shape {array.shape[1:]}"
        )


def holds(dtype: numpy.dtype[Any], values: Array) -> bool:
    """Whether an array of this type can hold these values, up to rounding of floating-point numbers."""
    if numpy.can_cast(values.dtype, dtype) or not numpy.can_cast(values.dtype, dtype, "same_kind"):
        return bool(numpy.can_cast(values.dtype, dtype))
    with numpy.errstate(over="ignore"):
        cast = values.astype(dtype)
    if dtype.kind in "iu":
        return numpy.array_equal(cast, values)
    return dtype.kind not in "fc" or numpy.array_equal(numpy.isinf(cast), numpy.isinf(values))


def are_short(stream: Stream, lengths: Array) -> bool:
    """Whether sequences of these lengths, at least one, are gathered faster than copied one by one."""
    return int(lengths.max()) * stream.dtype.itemsize * math.prod(stream.shape) <= SHORT


def gather(array: Array, starts: Array, lengths: Array, step: int = 1) -> Padded:
    """`pad` of parts of an array, without a Python loop over them.

    Args:
        starts, lengths: the place of the first frame and the number of frames of every sequence; of shape (batch,).
        step: the number of places from one frame to the next.
    """
    frames = numpy.arange(int(lengths.max()))
    is_inside = frames < lengths[:, None]
    places = starts[:, None] + (frames if step == 1 else frames * step)
    values = _take_frames(array, places * is_inside)  # only frames of sequences, and the first one: see `span`
    if values.ndim == 2 and values.dtype.kind in "biu":
        values *= is_inside  # which is faster; but NaN would stay
    else:
        values[~is_inside] = 0
    return Padded(values, lengths)


def gather_packed(array: Array, starts: Array, lengths: Array, step: int = 1) -> Packed:
    """As `gather`, but one sequence after the other, without padding."""
    return Packed(_take_frames(array, frame_places(starts, lengths, step)), lengths)


class _Span:
    """Memory from the first to the last of several arrays, as numpy's array interface; they stay alive with its views."""

    def __init__(self, arrays: Sequence[Array], first: Array, strides: tuple[int, ...], size: int) -> None:
        self._arrays = arrays
        self.__array_interface__ = first.__array_interface__ | {"shape": (size, *first.shape[1:]), "strides": strides}


def span(arrays: Sequence[Array]) -> tuple[Array, list[int], int] | None:
    """Read-only arrays of the same frames as one array, to gather sequences of all of them at once.

    Between the arrays is other memory, or none: no other places may be read.

    Returns:
        It, the place of each array in it, and the number of places from one frame to the next: more than 1 if arrays are apart by
        a number of bytes that is no number of whole frames. None: types or shapes differ, or there are no frames.
    """
    filled = [array for array in arrays if len(array)]
    if not filled or any((array.dtype, array.strides) != (filled[0].dtype, filled[0].strides) for array in filled):
        return None
    first = min(filled, key=lambda array: array.ctypes.data)
    apart = [array.ctypes.data - first.ctypes.data if len(array) else 0 for array in arrays]
    stride = math.gcd(first.strides[0], *apart)
    places = [distance // stride for distance in apart]
    step = first.strides[0] // stride
    size = max(start + step * len(array) for start, array in zip(places, arrays, strict=True))
    return numpy.asarray(_Span(arrays, first, (stride, *first.strides[1:]), size)), places, step


def frame_places(starts: Array, lengths: Array, step: int = 1) -> Array:
    """The frames from every start on, one sequence after the other: int64 of shape (frames,)."""
    before = lengths.cumsum(dtype=numpy.int64) - lengths
    frames = numpy.arange(int(lengths.sum(dtype=numpy.int64)))
    places: Array = (frames if step == 1 else frames * step) + numpy.repeat(starts - before * step, lengths)
    return places


def _take_frames(array: Array, places: Array) -> Array:
    if not len(array):
        return numpy.zeros((*places.shape, *array.shape[1:]), array.dtype)
    # HDF5 does not align data, and `take` would copy an unaligned array as a whole first.
    flags = array.flags
    return array.take(places, axis=0, mode="clip") if flags.aligned and flags.c_contiguous else array[places]
