"""Datasets that consist of several ones, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.types import Array, Stream
from hvdtrain.data.views import ChangedSequences
from hvdtrain.errors import DataError


class JoinedDataset(ChangedSequences):
    """The sequences of several datasets, one dataset after the other. A subclass says how they are read.

    Args:
        streams: by data key here.
    """

    def __init__(self, datasets: Sequence[Dataset], streams: Mapping[str, Stream]) -> None:
        super().__init__(datasets[0], datasets[1:])
        self.streams = streams
        self.memory_mapped = frozenset(name for name in streams if self._is_memory_mapped(name))
        self._join()

    def _join(self) -> None:
        self._first = numpy.cumsum([0] + [dataset.num_sequences for dataset in self._inside])
        self._starts = self._first.tolist()
        self.lengths = {name: numpy.concatenate(self._columns(name)) for name in self.streams}

    def _columns(self, name: str) -> list[Array]:
        """The lengths of a data key in every dataset."""
        return [dataset.lengths[name] for dataset in self._inside]

    def _is_memory_mapped(self, name: str) -> bool:
        """Whether a data key is memory-mapped in every dataset, and of the same type."""
        dtype = self.streams[name].dtype
        return all(name in dataset.memory_mapped and dataset.streams[name].dtype == dtype for dataset in self._inside)

    @property
    def num_sequences(self) -> int:
        return int(self._first[-1])

    def file_bounds(self) -> Array:
        begins = [dataset.file_bounds()[:-1] + first for dataset, first in zip(self._inside, self._first[:-1], strict=True)]
        return numpy.concatenate([*begins, self._first[-1:]])

    def tags(self, indices: Sequence[int]) -> list[str]:
        tags = [""] * len(indices)
        for number, rows, inside in split(indices, self._first):
            for row, tag in zip(rows, self._inside[number].tags(inside.tolist()), strict=True):
                tags[row] = tag
        return tags

    def tag_bytes(self, start: int, stop: int) -> Array:
        blocks = []
        for dataset, (first, end) in zip(self._inside, pairwise(self._starts), strict=True):
            if max(start, first) < min(stop, end):
                blocks.append(dataset.tag_bytes(max(start, first) - first, min(stop, end) - first))
        return numpy.concatenate(blocks) if blocks else numpy.zeros(0, dtype="S1")


def split(indices: Sequence[int] | Array, bounds: Sequence[int] | Array) -> Iterator[tuple[int, Array, Array]]:
    """For each dataset that has some of the indices: its number, the positions of these indices, and their indices in it.

    Args:
        bounds: the index of the first sequence of every dataset, then the number of sequences.
    """
    wanted = numpy.asarray(indices, dtype=numpy.int64)
    owners = numpy.searchsorted(bounds, wanted, side="right") - 1
    by_owner = numpy.argsort(owners, kind="stable")
    ordered = owners[by_owner]
    begins = numpy.flatnonzero(numpy.append(-1, ordered[:-1]) != ordered).tolist() if len(ordered) else []
    for begin, end in pairwise([*begins, len(ordered)]):
        number = int(ordered[begin])
        rows = by_owner[begin:end]
        yield number, rows, wanted[rows] - bounds[number]


def common_streams(where: str, by_dataset: Mapping[str, Mapping[str, Stream]]) -> dict[str, Stream]:
    """The streams of the first dataset, which all others must have. Raises: DataError."""
    first = next(iter(by_dataset))
    for name, streams in by_dataset.items():
        for data_key in by_dataset[first]:
            if data_key not in streams:
                raise DataError(f"{where}: expected the data key {data_key!r} of {first} in {name}, got {', '.join(streams)}")
    return {
        data_key: common_stream(
            f"{where}, data key {data_key!r}", {name: streams[data_key] for name, streams in by_dataset.items()}
        )
        for data_key in by_dataset[first]
    }


def common_stream(where: str, streams: Mapping[str, Stream]) -> Stream:
    """One stream for data that comes from several. Raises: DataError, if dimension, shape or labels differ, or no type holds all
    values: texts and numbers, or integers of uint64 and int64."""
    (first, stream), *other_streams = streams.items()
    labels = stream.labels
    for name, candidate in other_streams:
        if (candidate.dim, candidate.shape, candidate.sparse) != (stream.dim, stream.shape, stream.sparse):
            raise DataError(f"{where}: expected {stream.words} as in {first}, got {candidate.words} in {name}")
        if labels and candidate.labels and candidate.labels != labels:
            different = next((i for i, pair in enumerate(zip(labels, candidate.labels, strict=False)) if pair[0] != pair[1]), -1)
            raise DataError(
                f"{where}: expected the labels of {first}, got others in {name} (the first difference is at index {different})"
            )
        labels = labels or candidate.labels
    dtypes = {name: each.dtype for name, each in streams.items()}
    dtype = numpy.result_type(*dtypes.values()) if other_streams else stream.dtype
    kinds = {each.kind for each in dtypes.values()}
    if ("O" in kinds and len(kinds) > 1) or (dtype.kind == "f" and kinds <= {"i", "u"}):
        unlike = next(name for name, each in dtypes.items() if each != stream.dtype)
        raise DataError(f"{where}: expected the type {stream.dtype} of {first}, got {dtypes[unlike]} in {unlike}")
    return replace(stream, dtype=dtype, labels=labels)
