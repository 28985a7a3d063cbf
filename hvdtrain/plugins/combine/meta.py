"""MetaDataset: the data keys of several datasets of the same sequences, joined by tag.

Tags are joined with sorted arrays of hashes: dicts of millions of strings need gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.types import Array, Padded
from hvdtrain.data.views import ChangedSequences
from hvdtrain.errors import DataError
from hvdtrain.plugins.combine.keys import MetaDatasetKeys

TAGS_AT_ONCE = 1 << 18
"""Tags read at once: some tens of megabytes."""


def refuse_selection(where: str, dataset: Dataset, reason: str) -> None:
    """Raises: DataError, if a dataset selects some of its sequences for an epoch (`sampling_sizes`), where that would not count.

    Args:
        where: its config key.
    """
    if dataset.selected(1) is not None:
        raise DataError(f"{where}: expected a dataset without sampling_sizes, got them ({reason})")


def tag_blocks(dataset: Dataset, block: int = TAGS_AT_ONCE) -> Iterator[tuple[int, Array]]:
    """All tags in order, in blocks: the index of the first one, and the tags in UTF-8 as numpy bytes of shape (block,)."""
    for start in range(0, dataset.num_sequences, block):
        yield start, dataset.tag_bytes(start, min(start + block, dataset.num_sequences))


def hashes(tags: Array) -> Array:
    """The hash of every tag, uint64; it does not depend on the width to which the array pads the tags.

    >>> bool((hashes(numpy.array([b"a", b"b"], dtype="S3")) == hashes(numpy.array([b"a", b"b"], dtype="S20"))).all())
    True
    """
    width = -(-tags.dtype.itemsize // 8)
    words = numpy.ascontiguousarray(tags.astype(f"S{8 * width}", copy=False)).view(numpy.uint64).reshape(len(tags), width)
    result = numpy.zeros(len(tags), dtype=numpy.uint64)
    for column in range(width):  # a column of zeros adds nothing
        mixed = words[:, column] * _odd(column)
        mixed ^= mixed >> numpy.uint64(29)
        mixed *= _odd(column + (1 << 20))
        mixed ^= mixed >> numpy.uint64(32)
        result += mixed
    return result


def _odd(number: int) -> numpy.uint64:
    """A fixed odd number that looks random: a step of splitmix64."""
    mask = (1 << 64) - 1
    value = (number + 1) * 0x9E3779B97F4A7C15 & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return numpy.uint64((value ^ value >> 31) | 1)


class TagIndex:
    """The tags of one dataset, sorted by hash, to look up the tags of other datasets.

    It takes the bytes of the tags and 16 bytes per sequence; drop it once everything is joined.

    Raises:
        DataError: two sequences have the same tag.
    """

    def __init__(self, name: str, dataset: Dataset) -> None:
        self._name = name
        self._tags = _all_tags(dataset)
        unsorted = numpy.empty(len(self._tags), dtype=numpy.uint64)
        for start in range(0, len(self._tags), TAGS_AT_ONCE):
            unsorted[start : start + TAGS_AT_ONCE] = hashes(self._tags[start : start + TAGS_AT_ONCE])
        self._order = numpy.argsort(unsorted, kind="stable").astype(_index_type(len(unsorted)), copy=False)
        self._hashes = unsorted[self._order]
        self._run = self._longest_run()

    def positions_in(self, name: str, dataset: Dataset) -> Array | None:
        """For every sequence of this dataset, the index of the other's sequence with the same tag; None: the same index.

        Tags are compared in full, so sequences with the same hash are not mistaken for each other. Sequences that only the
        other dataset has are ignored.

        Raises:
            DataError: the other dataset does not have all of the tags, or has one of them twice.
        """
        has_same_size = dataset.num_sequences == len(self._tags)
        if has_same_size and all((block == self._tags[start : start + len(block)]).all() for start, block in tag_blocks(dataset)):
            return None
        positions = numpy.full(len(self._tags), -1, dtype=_index_type(dataset.num_sequences))
        for start, block in tag_blocks(dataset):
            here, there = self._lookup(block)
            distinct, counts = numpy.unique(here, return_counts=True)
            if len(twice := distinct[(counts > 1) | (positions[distinct] >= 0)]):
                raise DataError(f"{name}: expected every tag once, got {_text(self._tags[twice[0]])!r} twice")
            positions[here] = start + there
        missing = numpy.flatnonzero(positions < 0)
        if len(missing):
            raise DataError(
                f"{name}: expected all {len(self._tags)} tags of {self._name}, got {len(self._tags) - len(missing)}: "
                f"{len(missing)} are missing, the first is {_text(self._tags[missing[0]])!r}"
            )
        return positions

    def _lookup(self, block: Array) -> tuple[Array, Array]:
        """Which tags of the block this dataset has: positions in the dataset, and in the block."""
        wanted = hashes(block)
        by_hash = numpy.argsort(wanted, kind="stable")  # sorted, so that the search walks through the index in one direction
        places = numpy.empty(len(wanted), dtype=numpy.int64)
        places[by_hash] = numpy.searchsorted(self._hashes, wanted[by_hash])
        here = []
        there = []
        for step in range(self._run):  # one step, unless two tags have the same hash
            inside = numpy.flatnonzero(places + step < len(self._hashes))
            candidates = self._order[places[inside] + step]
            same = self._hashes[places[inside] + step] == wanted[inside]
            inside = inside[same]
            candidates = candidates[same]
            same = self._tags[candidates] == block[inside]
            here.append(candidates[same])
            there.append(inside[same])
        return numpy.concatenate(here), numpy.concatenate(there)

    def _longest_run(self) -> int:
        """The largest number of tags with the same hash. Raises: DataError, if a tag occurs twice."""
        longest = 1
        while len(same := numpy.flatnonzero(self._hashes[longest:] == self._hashes[:-longest])):
            first = self._order[same]
            second = self._order[same + longest]
            for start in range(0, len(same), TAGS_AT_ONCE):
                equal = self._tags[first[start : start + TAGS_AT_ONCE]] == self._tags[second[start : start + TAGS_AT_ONCE]]
                if equal.any():
                    tag = self._tags[first[start + int(numpy.argmax(equal))]]
                    raise DataError(f"{self._name}: expected every tag once, got {_text(tag)!r} twice")
            longest += 1
        return longest


def _all_tags(dataset: Dataset) -> Array:
    blocks = [block for _, block in tag_blocks(dataset)][::-1]
    width = max((block.dtype.itemsize for block in blocks), default=1)
    tags = numpy.empty(dataset.num_sequences, dtype=f"S{width}")
    start = 0
    while blocks:
        block = blocks.pop()
        tags[start : start + len(block)] = block
        start += len(block)
    return tags


def _index_type(size: int) -> type[numpy.int32] | type[numpy.int64]:
    return numpy.int32 if size <= numpy.iinfo(numpy.int32).max else numpy.int64


def _text(tag: bytes) -> str:
    return tag.decode("utf-8", errors="replace")


class MetaDataset(ChangedSequences):
    """Sequence i of the control dataset, with data keys from all datasets.

    Args:
        where: the config key, for messages.
        sources: by data key: the name of a dataset and the data key there.
        positions: by name of a dataset, the index of its sequence that belongs to sequence i; None: i itself.
    """

    def __init__(
        self,
        where: str,
        datasets: Mapping[str, Dataset],
        sources: Mapping[str, tuple[str, str]],
        control: str,
        positions: Mapping[str, Array | None],
    ) -> None:
        self._names = [control, *(name for name in datasets if name != control)]
        super().__init__(datasets[control], [datasets[name] for name in self._names[1:]])
        self._where = where
        self._positions = positions
        self._keys: dict[str, dict[str, str]] = {}
        self.streams = {key: datasets[name].streams[there] for key, (name, there) in sources.items()}
        for data_key, (name, there) in sources.items():
            self._keys.setdefault(name, {})[data_key] = there
        self._sources = sources
        self.lengths = self._joined_lengths()
        self.memory_mapped = frozenset(
            data_key for data_key, (name, there) in sources.items() if there in datasets[name].memory_mapped
        )

    @property
    def _datasets(self) -> dict[str, Dataset]:
        return dict(zip(self._names, self._inside, strict=True))

    def at_epoch(self, epoch: int) -> Self:
        changed = super().at_epoch(epoch)
        for name, before, now in zip(self._names, self._inside, changed._inside, strict=True):
            if now.num_sequences != before.num_sequences:
                raise DataError(
                    f"{self._where}.datasets.{name}: expected the same sequences in every epoch, as they are joined by tag, got "
                    f"{now.num_sequences} in epoch {epoch} and {before.num_sequences} at the start"
                )
        if any(now.lengths is not before.lengths for before, now in zip(self._inside, changed._inside, strict=True)):
            changed.lengths = changed._joined_lengths()
        return changed

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        """Each dataset reads its data keys of all the sequences at once."""
        result: list[dict[str, Array]] = [{} for _ in indices]
        for name, keys in self._keys.items():
            places = self._positions[name]
            there = indices if places is None else places[numpy.asarray(indices)].tolist()
            for sequence, arrays in zip(result, self._datasets[name].sequences(there), strict=True):
                sequence.update({data_key: arrays[source] for data_key, source in keys.items()})
        return [{data_key: sequence[data_key] for data_key in self.streams} for sequence in result]

    def padded(self, indices: Array) -> dict[str, Padded]:
        """Each dataset reads its data keys of the batch at once."""
        result = {}
        for name, keys in self._keys.items():
            places = self._positions[name]
            batch = self._datasets[name].padded(indices if places is None else places[indices])
            result.update({data_key: batch[there] for data_key, there in keys.items()})
        return {data_key: result[data_key] for data_key in self.streams}

    def _joined_lengths(self) -> dict[str, Array]:
        lengths = {}
        for data_key, (name, there) in self._sources.items():
            column = self._datasets[name].lengths[there]
            places = self._positions[name]
            lengths[data_key] = column if places is None else column[places]
        return lengths

    def how_read(self) -> str:
        joined = [name for name, places in self._positions.items() if places is not None]
        ways = [f"{name}: {how}" for name, dataset in self._datasets.items() if (how := dataset.how_read())]
        return "; ".join(ways + ([f"{', '.join(joined)} joined by tag"] if joined else []))


def open_meta(where: str, keys: MetaDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Join datasets by tag.

    Args:
        where: the config key of the dataset, for messages.

    Raises:
        DataError: a data key or a tag is missing, or a tag occurs twice.
    """
    sources = {data_key: (str(name), str(there)) for data_key, (name, there) in keys.data_map.items()}
    for data_key, (name, there) in sources.items():
        if there not in datasets[name].streams:
            raise DataError(
                f"{where}.data_map.{data_key}: expected a data key of {name} ({', '.join(datasets[name].streams)}), got {there!r}"
            )
    needed = {keys.ordered_by, *(name for name, _ in sources.values())}
    used = {name: dataset for name, dataset in datasets.items() if name in needed}
    positions: dict[str, Array | None] = {keys.ordered_by: None}
    joined = [name for name in used if name != keys.ordered_by]
    for name in joined:
        control = f"seq_order_control_dataset, here {keys.ordered_by}, says which sequences an epoch takes"
        refuse_selection(f"{where}.datasets.{name}", used[name], control)
    if joined:
        index = TagIndex(f"{where}.datasets.{keys.ordered_by}", used[keys.ordered_by])
        positions |= {name: index.positions_in(f"{where}.datasets.{name}", used[name]) for name in joined}
    for name, dataset in datasets.items():
        if name not in used:
            dataset.close()
    return MetaDataset(where, used, sources, keys.ordered_by, positions)
