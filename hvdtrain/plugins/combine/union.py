"""CombinedDataset, ConcatDataset, MixingDataset: the sequences of several datasets, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Self

import numpy

from hvdtrain.data.combine.joined import JoinedDataset, common_stream, common_streams, split
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.padding import are_short, frame_places, holds
from hvdtrain.data.types import Array, Packed, Padded, Stream, UnlikeError
from hvdtrain.data.views import OF_ANY
from hvdtrain.errors import DataError
from hvdtrain.plugins.combine.keys import CombinedDatasetKeys, ConcatDatasetKeys, MixingDatasetKeys
from hvdtrain.plugins.combine.meta import refuse_selection
from hvdtrain.plugins.combine.mix import WeightedMix

SEQUENCES_PER_PART = 8
"""If a batch has fewer sequences per dataset than this, they are read one by one, which is then faster."""


class UnionDataset(JoinedDataset):
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
        self._where = where
        self._sampling_sizes = sampling_sizes
        self._keys = keys
        super().__init__(datasets, streams)
        self._empty = {name: numpy.zeros((0, *stream.shape), dtype=stream.dtype) for name, stream in streams.items()}
        if sampling_sizes is not None:
            self.is_stochastic = True
        if any(dataset.collate != datasets[0].collate for dataset in datasets):
            raise DataError(f"{where}: expected datasets with one and the same collate, or none, got others inside")
        sizes = {dataset.max_seqs for dataset in datasets}
        self.max_seqs = sizes.pop() if len(sizes) == 1 else None  # where they differ, a key has to say it

    def _columns(self, name: str) -> list[Array]:
        return [
            dataset.lengths[keys[name]] if name in keys else numpy.zeros(dataset.num_sequences, dtype=numpy.int32)
            for keys, dataset in zip(self._keys, self._inside, strict=True)
        ]

    def _is_memory_mapped(self, name: str) -> bool:
        having = [(dataset, keys[name]) for keys, dataset in zip(self._keys, self._inside, strict=True) if name in keys]
        dtype = self.streams[name].dtype
        return all(key in dataset.memory_mapped and dataset.streams[key].dtype == dtype for dataset, key in having)

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

    def selected(self, full_epoch: int) -> Array | None:
        """What the datasets select. With `sampling_sizes`: the next sequences of each dataset, starting again from the beginning
        where it ends.
        """
        selected = [dataset.selected(full_epoch) for dataset in self._inside]
        if self.mix is not None and any(indices is not None for indices in selected):
            raise DataError(
                f"{self._where}: expected datasets that select the same sequences in every epoch, to mix them, got others"
            )
        if self._sampling_sizes is not None:
            if any(indices is not None for indices in selected):
                raise DataError(f"{self._where}: expected sampling_sizes here or in a dataset inside, got both")
            sizes = zip(self._sampling_sizes, self._inside, strict=True)
            selected = [
                (numpy.arange(size, dtype=numpy.int64) + (full_epoch - 1) * size) % dataset.num_sequences
                for size, dataset in sizes
            ]
        elif all(indices is None for indices in selected):
            return None
        bounds = pairwise(self._first.tolist())
        of_datasets = zip(selected, bounds, strict=True)
        return numpy.concatenate([numpy.arange(*bound) if some is None else bound[0] + some for some, bound in of_datasets])

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
        pieces = []
        for number, rows, inside in split(indices, self._first):
            dataset = self._inside[number]
            there = self._keys[number]
            packed = [there[name] for name in keys if name in there]
            batch = dataset.packed(inside, packed) if packed else dataset.padded(inside)
            pieces.append((rows, {name: batch[source] for name, source in there.items() if source in batch}))
        return merge_batches(self.streams, lengths, keys, pieces)

    def how_read(self) -> str:
        sizes = ", ".join(str(dataset.num_sequences) for dataset in self._inside)
        ways = sorted({how for dataset in self._inside if (how := dataset.how_read())})
        return "; ".join([f"{sizes} sequences of {len(self._inside)} datasets", *ways])


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
    return concatenate(where, datasets)


def open_mixing(where: str, keys: MixingDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open a MixingDataset. Raises: DataError."""
    for name, dataset in datasets.items():
        refuse_selection(f"{where}.datasets.{name}", dataset, "weights and stop say how many sequences an epoch takes")
    union = concatenate(where, datasets)
    ends = numpy.cumsum([dataset.num_sequences for dataset in datasets.values()]).tolist()
    bounds = dict(zip(datasets, zip([0, *ends[:-1]], ends, strict=True), strict=True))
    union.mix = WeightedMix(where, bounds, keys.weights, keys.temperature, keys.by, keys.stop)
    return union


def concatenate(where: str, datasets: Mapping[str, Dataset]) -> UnionDataset:
    """Datasets with the data keys of the first one, one after the other; further keys are ignored. Raises: DataError."""
    streams = common_streams(where, {name: dataset.streams for name, dataset in datasets.items()})
    same = dict(zip(streams, streams, strict=True))
    return UnionDataset(where, list(datasets.values()), [same] * len(datasets), streams)


def merge_batches(
    streams: Mapping[str, Stream],
    lengths: Mapping[str, Array],
    packed: Collection[str],
    pieces: Sequence[tuple[Array, Mapping[str, Padded]]],
) -> dict[str, Padded]:
    """One batch made of several, each given with its rows in the whole. Rows are empty in data keys missing from their part.

    Args:
        lengths: by data key, of all rows, for rows that are missing; those of the others are the parts'.
        packed: the data keys without padding.

    Raises:
        UnlikeError: numpy would repeat, round or cut a part.
    """
    batch: dict[str, Padded] = {}
    for name, stream in streams.items():
        pieces_with_key = [(rows, batch_there[name]) for rows, batch_there in pieces if name in batch_there]
        seq_lens = numpy.zeros_like(lengths[name])  # not those that were planned: a dataset that returns others is to be noticed
        for rows, some in pieces_with_key:
            if len(some.seq_lens) == len(rows):
                seq_lens[rows] = some.seq_lens
            if name in packed:
                frames: tuple[int, ...] = (int(seq_lens[rows].sum(dtype=numpy.int64)),)
            else:
                frames = len(rows), max([int(seq_lens[rows].max()), *some.values.shape[1:2]])
            is_like = some.values.dtype == stream.dtype or holds(stream.dtype, some.values)
            if some.values.shape != (*frames, *stream.shape) or not is_like:
                raise UnlikeError(
                    f"data key {name!r}: expected {stream.dtype} of shape {(*frames, *stream.shape)} for {len(rows)} sequences, "
                    f"got {some.values.dtype} of shape {some.values.shape} with {len(some.seq_lens)} lengths"
                )
        longest = max((some.values.shape[1] for _, some in pieces_with_key), default=0) if name not in packed else 0
        shape = (int(seq_lens.sum(dtype=numpy.int64)),) if name in packed else (len(seq_lens), longest)
        values = numpy.full((*shape, *stream.shape), "" if stream.dtype.kind in "OU" else 0, stream.dtype)
        starts = seq_lens.cumsum(dtype=numpy.int64) - seq_lens
        for rows, some in pieces_with_key:
            if name in packed:
                values[frame_places(starts[rows], some.seq_lens)] = some.values
            else:
                values[rows, : some.values.shape[1]] = some.values
        batch[name] = (Packed if name in packed else Padded)(values, seq_lens)
    return batch
