"""CombinedDataset, ConcatDataset, MixingDataset: the sequences of several datasets, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Self, TypeVar

import numpy

from hvdtrain.data.combine.keys import CombinedDatasetKeys, ConcatDatasetKeys, MixingDatasetKeys
from hvdtrain.data.combine.parts import concatenate_tag_bytes, concatenate_tags, refuse_selection, split
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.padding import are_short, merge_batches
from hvdtrain.data.plan.mix import Mix
from hvdtrain.data.types import Array, Padded, Stream
from hvdtrain.data.views import OF_ANY, ChangedSequences
from hvdtrain.errors import DataError

T = TypeVar("T", bound="UnionDataset")

SEQUENCES_PER_PART = 8
"""If a batch has fewer sequences per dataset than this, they are read one by one, which is then faster."""


class UnionDataset(ChangedSequences):
    """The sequences of several datasets, one dataset after the other.

    Args:
        where: the config key, for messages.
        keys: for each dataset, the data key there by data key here. A sequence is empty in the data keys left out.
        streams: by data key here.
        sampling_sizes: how many sequences of each dataset a full epoch takes; None: all.
    """

    reads_for_tags: bool = OF_ANY()
    reads_batches: bool = OF_ANY()

    def __init__(
        self,
        where: str,
        datasets: Sequence[Dataset],
        keys: Sequence[Mapping[str, str]],
        streams: Mapping[str, Stream],
        sampling_sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(datasets[0], datasets[1:])
        self._where = where
        self._sampling_sizes = sampling_sizes
        self._keys = keys
        self._empty = {name: numpy.zeros((0, *stream.shape), dtype=stream.dtype) for name, stream in streams.items()}
        self.streams = streams
        self.memory_mapped = frozenset(name for name in streams if self._is_memory_mapped(name))
        if sampling_sizes is not None:
            self.is_stochastic = True
        if any(dataset.collate != datasets[0].collate for dataset in datasets):
            raise DataError(f"{where}: expected datasets with one and the same collate, or none, got others inside")
        sizes = {dataset.max_seqs for dataset in datasets}
        self.max_seqs = sizes.pop() if len(sizes) == 1 else None  # where they differ, a key has to say it
        self._join()

    def _join(self) -> None:
        self._first = numpy.cumsum([0] + [dataset.num_sequences for dataset in self._inside])
        self._starts = self._first.tolist()
        self.lengths = {name: numpy.concatenate(self._columns(name)) for name in self.streams}

    def at_epoch(self, epoch: int) -> Self:
        changed = super().at_epoch(epoch)
        if any(now.lengths is not before.lengths for now, before in zip(changed._inside, self._inside, strict=True)):
            changed._join()
        if changed.mix is not None and not numpy.array_equal(changed._first, self._first):
            raise DataError(
                f"{self._where}: expected datasets with the same sequences in every epoch, to mix them, got "
                f"{numpy.diff(changed._first).tolist()} in epoch {epoch} and {numpy.diff(self._first).tolist()} at the start"
            )
        return changed

    @property
    def num_sequences(self) -> int:
        return int(self._first[-1])

    def file_bounds(self) -> Array:
        begins = [dataset.file_bounds()[:-1] + first for dataset, first in zip(self._inside, self._first[:-1], strict=True)]
        return numpy.concatenate([*begins, self._first[-1:]])

    def selected(self, full_epoch: int) -> Array | None:
        """What the datasets select. With `sampling_sizes`: the next sequences of each dataset, starting again from the beginning
        where it ends.
        """
        selected = [dataset.selected(full_epoch) for dataset in self._inside]
        if self.mix is not None and any(of_one is not None for of_one in selected):
            raise DataError(
                f"{self._where}: expected datasets that select the same sequences in every epoch, to mix them, got others"
            )
        if self._sampling_sizes is not None:
            if any(of_one is not None for of_one in selected):
                raise DataError(f"{self._where}: expected sampling_sizes here or in a dataset inside, got both")
            sizes = zip(self._sampling_sizes, self._inside, strict=True)
            selected = [
                (numpy.arange(size, dtype=numpy.int64) + (full_epoch - 1) * size) % dataset.num_sequences
                for size, dataset in sizes
            ]
        elif all(of_one is None for of_one in selected):
            return None
        bounds = pairwise(self._first.tolist())
        parts = zip(selected, bounds, strict=True)
        return numpy.concatenate([numpy.arange(*bound) if some is None else bound[0] + some for some, bound in parts])

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        """Each dataset reads its sequences at once."""
        result: list[dict[str, Array]] = [{} for _ in indices]
        for number, rows, inside in split(indices, self._first):
            keys = self._keys[number]
            for row, arrays in zip(rows.tolist(), self._inside[number].sequences(inside.tolist()), strict=True):
                result[row] = {
                    name: arrays[keys[name]].astype(self.streams[name].dtype, copy=False) if name in keys else empty
                    for name, empty in self._empty.items()
                }
        return result

    def padded(self, indices: Array) -> dict[str, Padded]:
        return self.packed(indices, ())

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        """Each dataset reads its part of the batch at once, unless sequences are long, or of too many datasets; but a user's own
        methods for batches are called."""
        lengths = {name: column[indices] for name, column in self.lengths.items()}
        most = len(indices) // SEQUENCES_PER_PART
        owners = numpy.searchsorted(self._first, indices, side="right")
        is_spread = len(self._inside) > most and len(numpy.unique(owners)) > most
        is_slow = is_spread or not all(are_short(stream, lengths[name]) for name, stream in self.streams.items())
        if self.collate is not None or (is_slow and not self.reads_batches):
            return super().packed(indices, keys)
        parts = []
        for number, rows, inside in split(indices, self._first):
            dataset = self._inside[number]
            there = self._keys[number]
            packed = [there[name] for name in keys if name in there]
            batch = dataset.packed(inside, packed) if packed else dataset.padded(inside)
            parts.append((rows, {name: batch[source] for name, source in there.items() if source in batch}))
        return merge_batches(self.streams, lengths, keys, parts)

    def tags(self, indices: Sequence[int]) -> list[str]:
        return concatenate_tags(indices, self._first, lambda number, inside: self._inside[number].tags(inside.tolist()))

    def tag_bytes(self, start: int, stop: int) -> Array:
        return concatenate_tag_bytes(start, stop, self._first, lambda number, *inside: self._inside[number].tag_bytes(*inside))

    def how_read(self) -> str:
        sizes = ", ".join(str(dataset.num_sequences) for dataset in self._inside)
        ways = sorted({how for dataset in self._inside if (how := dataset.how_read())})
        return "; ".join([f"{sizes} sequences of {len(self._inside)} datasets", *ways])

    def _columns(self, name: str) -> list[Array]:
        """The lengths of a data key in every dataset."""
        return [
            dataset.lengths[keys[name]] if name in keys else numpy.zeros(dataset.num_sequences, dtype=numpy.int32)
            for dataset, keys in zip(self._inside, self._keys, strict=True)
        ]

    def _is_memory_mapped(self, name: str) -> bool:
        """Whether a data key is memory-mapped in every dataset that has it, and of the same type."""
        return all(
            name not in keys
            or (keys[name] in dataset.memory_mapped and dataset.streams[keys[name]].dtype == self.streams[name].dtype)
            for dataset, keys in zip(self._inside, self._keys, strict=True)
        )


def open_combined(where: str, keys: CombinedDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open a CombinedDataset. Raises: DataError."""
    maps: dict[str, dict[str, str]] = {name: {} for name in datasets}
    for (name, there), here in keys.data_map.items():
        if there not in datasets[name].streams:
            raise DataError(
                f"{where}.data_map: expected a data key of {name} ({', '.join(datasets[name].streams)}), got {there!r}"
            )
        maps[name][here] = there
    names = list(dict.fromkeys(keys.data_map.values()))
    streams = {}
    for here in names:
        sources = {f"{name}.{there[here]}": datasets[name].streams[there[here]] for name, there in maps.items() if here in there}
        streams[here] = common_stream(f"{where}, data key {here!r}", sources)
    sizes = keys.sampling_sizes
    if isinstance(sizes, int):
        sizes = dict.fromkeys(datasets, sizes)
    chosen = None if sizes is None else [sizes[name] for name in datasets]
    return UnionDataset(where, list(datasets.values()), list(maps.values()), streams, chosen)


def open_concat(where: str, keys: ConcatDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open a ConcatDataset. Raises: DataError."""
    return concatenate(where, datasets, UnionDataset)


def open_mixing(where: str, keys: MixingDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open a MixingDataset. Raises: DataError."""
    for name, dataset in datasets.items():
        refuse_selection(f"{where}.datasets.{name}", dataset, "weights and stop say how many sequences an epoch takes")
    union = concatenate(where, datasets, UnionDataset)
    ends = numpy.cumsum([dataset.num_sequences for dataset in datasets.values()]).tolist()
    bounds = dict(zip(datasets, zip([0, *ends[:-1]], ends, strict=True), strict=True))
    union.mix = Mix(where, bounds, keys.weights, keys.temperature, keys.by, keys.stop)
    return union


def concatenate(where: str, datasets: Mapping[str, Dataset], kind: type[T]) -> T:
    """Datasets with the data keys of the first one, one after the other; further keys are ignored. Raises: DataError."""
    streams = common_streams(where, {name: dataset.streams for name, dataset in datasets.items()})
    same = dict(zip(streams, streams, strict=True))
    return kind(where, list(datasets.values()), [same] * len(datasets), streams)


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
    (first, stream), *others = streams.items()
    labels = stream.labels
    for name, candidate in others:
        if (candidate.dim, candidate.shape, candidate.sparse) != (stream.dim, stream.shape, stream.sparse):
            raise DataError(f"{where}: expected {_words(stream)} as in {first}, got {_words(candidate)} in {name}")
        if labels and candidate.labels and candidate.labels != labels:
            different = next((i for i, pair in enumerate(zip(labels, candidate.labels, strict=False)) if pair[0] != pair[1]), -1)
            raise DataError(
                f"{where}: expected the labels of {first}, got others in {name} (the first difference is at index {different})"
            )
        labels = labels or candidate.labels
    dtypes = {name: each.dtype for name, each in streams.items()}
    dtype = numpy.result_type(*dtypes.values()) if others else stream.dtype
    kinds = {each.kind for each in dtypes.values()}
    if ("O" in kinds and len(kinds) > 1) or (dtype.kind == "f" and kinds <= {"i", "u"}):
        unlike = next(name for name, each in dtypes.items() if each != stream.dtype)
        raise DataError(f"{where}: expected the type {stream.dtype} of {first}, got {dtypes[unlike]} in {unlike}")
    return replace(stream, dtype=dtype, labels=labels)


def _words(stream: Stream) -> str:
    return f"{'class indices' if stream.sparse else 'frames'} of shape {stream.shape} and dimension {stream.dim}"
