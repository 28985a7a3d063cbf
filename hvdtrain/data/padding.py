"""Some sequences of any dataset as a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy

from hvdtrain.data.batches import pad
from hvdtrain.data.types import Array, Dataset, Padded, Stream


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
