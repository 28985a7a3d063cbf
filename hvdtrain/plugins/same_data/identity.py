"""Identifies the data of a training, to notice if the training continues with other data.

For each dataset without others inside it, a checkpoint has checksums of all lengths, some tags and some values. Only these
decide: the same sequences in another folder, in another number of files or compressed are the same data. Sizes and times of
files only explain a difference. What only rounds differently, as on another processor, is the same; and a data key that is
another one when it is read again, such as one that the config augments, is not compared.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy

from hvdtrain.data.dataset import Dataset, DatasetPart
from hvdtrain.data.randomness import own_numbers
from hvdtrain.data.types import Array
from hvdtrain.errors import BrokenSequence

Identity = dict[str, Any]
"""Of a dataset, in plain values:

    name        the key of its dict in the config
    bounds      the index of the first sequence of every file, then the number of sequences
    files       of each its path, its size in bytes, and the time of its last modification in nanoseconds
    lengths     by data key, a checksum for every file
    tags        of some blocks: the index of the first sequence, that after the last one, and a checksum
    values      in older checkpoints: of some sequences, the index and a checksum of all values
    samples     by data key, of some sequences the index and what `_numbers` returns
"""

TAGS = 512
"""The tags per block. Tags that are read from the sequences are sampled like values instead."""

BLOCKS = 16
"""The number of blocks of all datasets together."""

SEQUENCES = 64
"""The number of sequences whose values are read, of all datasets together."""

OWN_SEQUENCES = 8
"""The same of a dataset that the user's code may make, and that is read twice."""

AGAIN = 16
"""How often sequences are read to see whether what differs is random."""

ENDS = 32 << 10
"""The bytes at the beginning and at the end of a sequence that are compared."""

LENGTHS = 1 << 22
"""The number of lengths that are converted at once."""

Values = dict[str, tuple[tuple[int, ...], list[float]]]
"""Of a sequence by data key: the shape, and what `_numbers` returns."""


def identify(leaves: Sequence[DatasetPart]) -> list[Identity]:
    """The identities of a dataset's leaves, the datasets without others inside. Raises: DataError, if they cannot be read."""
    identities = [_identity(leaf, BLOCKS // len(leaves), SEQUENCES // len(leaves)) for leaf in leaves]
    for leaf in leaves:
        leaf.dataset.release()
    return identities


def _identity(leaf: DatasetPart, blocks: int, sequences: int) -> Identity:
    dataset = leaf.dataset
    number = leaf.dataset.num_sequences
    size, blocks = (1, sequences) if dataset.reads_for_tags else (TAGS, blocks)
    values_by_index, random = _read(leaf, _sampled(leaf, sequences), 1 if leaf.files else 2)
    starts = [size * block for block in _spread(-(-number // size), blocks)]
    ends = [min(start + size, number) for start in starts]
    return {
        "name": leaf.name,
        "bounds": leaf.bounds,
        "files": [[path, *_size_and_time(path)] for path in leaf.files],
        "lengths": {
            key: [_lengths_checksum(column[a:b]) for a, b in pairwise(leaf.bounds)] for key, column in dataset.lengths.items()
        },
        "tags": [
            [*block, tags] for block in zip(starts, ends, strict=True) if (tags := _tags_checksum(dataset, *block)) is not None
        ],
        "values": [],
        "samples": {
            key: [[index, *values[key][1]] for index, values in values_by_index.items() if key in values]
            for key in dataset.lengths
            if key not in random
        },
    }


def _sampled(leaf: DatasetPart, wanted: int) -> list[int]:
    """Sequences whose values are compared: none of a dataset that is read from beginning to end."""
    if leaf.dataset.has_fixed_order:
        return []
    if not leaf.files:
        return _spread(leaf.dataset.num_sequences, OWN_SEQUENCES)
    indices = set(_spread(leaf.dataset.num_sequences, wanted))
    if len(leaf.bounds) <= wanted:
        indices |= {(start + end) // 2 for start, end in pairwise(leaf.bounds) if start < end}
    return sorted(indices)


def changes(before: Sequence[Identity], leaves: Sequence[DatasetPart]) -> Iterator[str]:
    """The first change in each leaf, such as 'other values in sequence 'a' of train.hdf'. Raises: DataError."""
    if len(before) != len(leaves):
        yield f"{len(leaves)} datasets instead of {len(before)}"
        return
    by_name = {identity["name"]: identity for identity in before}
    for identity, leaf in zip(before, leaves, strict=True):
        change = next(_differences(by_name.get(leaf.name, identity), leaf), None)
        if change is not None:
            yield change


def rewritten_files(before: Sequence[Identity], leaves: Sequence[DatasetPart]) -> list[str]:
    """The files whose size or modification time has changed."""
    old = {path: about for identity in before for path, *about in identity["files"]}
    return [path for leaf in leaves for path in leaf.files if path in old and old[path] != _size_and_time(path)]


def _differences(before: Identity, leaf: DatasetPart) -> Iterator[str]:
    dataset = leaf.dataset
    bounds = leaf.bounds
    if bounds[-1] != before["bounds"][-1]:
        now = numpy.diff(bounds).tolist()
        old = numpy.diff(before["bounds"]).tolist()
        place = next((place for place, (a, b) in enumerate(zip(old, now, strict=False)) if a != b), 0)
        if len(now) == len(old):
            yield f"{now[place]} sequences instead of {old[place]} in {_place(before, leaf, bounds[place])}"
        yield f"{bounds[-1]} sequences instead of {before['bounds'][-1]} in {leaf.name}"
        return
    for key, checksums in before["lengths"].items():
        if key not in dataset.lengths:
            yield f"no data key {key!r} in {_place(before, leaf, 0)}"
            return
        for (start, end), checksum in zip(pairwise(before["bounds"]), checksums, strict=True):
            if _lengths_checksum(dataset.lengths[key][start:end]) != checksum:
                yield f"other lengths of {key!r} in {_place(before, leaf, start)}"
    for start, end, checksum in before["tags"]:
        if _tags_checksum(dataset, start, end) not in (None, checksum):
            yield f"other tags in {_place(before, leaf, start)}"
    if dataset.has_fixed_order:
        return
    columns = before.get("samples", {})
    values_now, _ = _read(leaf, sorted({index for column in columns.values() for index, *_ in column}))
    changed = {
        (index, key)
        for key, column in columns.items()
        for index, *numbers in column
        if index in values_now and not _is_close(numbers, values_now[index].get(key, ((), []))[1])
    }
    for index, checksum in before["values"]:
        if _checksum(dataset, index, before["lengths"]) != checksum:
            changed |= {(index, key) for key in before["lengths"]}
    if changed:
        _, random = _read(leaf, sorted({*_spread(dataset.num_sequences, OWN_SEQUENCES), min(changed)[0]}), AGAIN)
        for index in sorted({index for index, key in changed if key not in random}):
            yield f"other values in sequence {dataset.tags([index])[0]!r} of {_place(before, leaf, index)}"


@dataclass(frozen=True)
class Sample:
    """Some sequences as they are in batches of an epoch.

    Attributes:
        names: of what has to be the same to the last bit: the tags and shapes of these sequences, and the tags of blocks.
        numbers: of these sequences, by data key, what `_numbers` returns.
        random: the data keys that were others when they were read again.
    """

    names: Mapping[str, str]
    numbers: Mapping[str, Mapping[str, list[float]]]
    random: frozenset[str]

    def outline(self) -> Sample:
        """Which sequences could be read, and what is random."""
        return Sample({}, dict.fromkeys(self.numbers, {}), self.random)


def sample_of(whole: Dataset, epoch: int, times: int) -> Sample:
    """A sample of a dataset, of which no sequences if it is read from beginning to end. Raises: DataError.

    Args:
        times: how often sequences are read.
    """
    dataset = whole.at_epoch(epoch)
    leaf = DatasetPart("", dataset)
    number = dataset.num_sequences
    values_by_index, random = _read(leaf, _sampled(leaf, OWN_SEQUENCES), times)
    names = {}
    numbers = {}
    for index, values in values_by_index.items():
        shapes = {key: shape for key, (shape, _) in values.items()}
        names[f"sequence {index}"] = f"{dataset.tags([index])[0]!r}, {shapes}"
        numbers[f"sequence {index}"] = {key: numbers for key, (_, numbers) in values.items()}
    for block in [] if dataset.reads_for_tags else _spread(-(-number // TAGS), BLOCKS):
        start = TAGS * block
        stop = min(start + TAGS, number)
        names[f"tags of sequences {start} to {stop - 1}"] = f"checksum {_tags_checksum(dataset, start, stop):08x}"
    return Sample(names, numbers, frozenset(random))


def as_close(sample: Sample, by_rank: Sequence[Sample]) -> dict[str, str]:
    """A rank's sample as text, which is that of the first rank where only the rounding differs, without what is random on a rank,
    or could not be read there.

    Args:
        by_rank: the samples of all ranks; of all but the first, outlines are enough.
    """
    random = frozenset().union(*(sample.random for sample in by_rank))
    texts = {}
    for place, name in sample.names.items():
        if place in sample.numbers and not all(place in outline.numbers for outline in by_rank):
            continue
        texts[place] = name
        firsts = by_rank[0].numbers.get(place, {})
        for key, numbers in sample.numbers.get(place, {}).items():
            if key not in random:
                shown = firsts[key] if _is_close(numbers, firsts.get(key, [])) else numbers
                kind = "checksum" if len(shown) == 1 else "sums"
                texts[place] += f", {kind} of {key!r} {' '.join(f'{number:.10g}' for number in shown)}"
    return texts


def _numbers(values: Array) -> list[float]:
    """What both ends of values have: a checksum; or if they are not whole numbers, three sums that another processor may round
    otherwise: of their absolute values, of these by their places, and of the values with irregular weights. (The first two are
    the same for all soft targets, whose frames add up to one.) Products are summed up here, as BLAS would start threads."""
    if values.dtype.kind not in "fc":
        return [_checksum_of({"": values}, [""])]
    flat = numpy.ascontiguousarray(numpy.concatenate(_ends(values))).ravel()
    flat = flat.view(flat.real.dtype)
    size = numpy.abs(flat)
    dtype = numpy.result_type(flat.dtype, numpy.float32)
    places = numpy.arange(len(flat), dtype=numpy.float64)
    with numpy.errstate(invalid="ignore"):  # 0 times an infinite value, which the data may have
        by_place = size * places.astype(numpy.float32)
        weighted = flat * numpy.sin(places**2)
    last = float(weighted.sum()) * len(flat) ** 0.5  # rounding adds up with the root of the number of values
    return [float(size.sum(dtype=dtype)), float(by_place.sum(dtype=dtype)) / max(1, len(flat) - 1), last]


def _is_close(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether what `_numbers` returned is of the same values."""
    if [*first] == [*second] or len(first) != len(second) or len(first) < 2:
        return [*first] == [*second]
    if not numpy.allclose(first[:2], second[:2], rtol=1e-3, atol=1e-6, equal_nan=True):
        return False
    return not numpy.isfinite(first[0]) or abs(first[2] - second[2]) <= 1e-2 * first[0] + 1e-6


def _place(before: Identity, leaf: DatasetPart, index: int) -> str:
    """The file that contains a sequence, and changes of its size and time."""
    path = leaf.file_of(index)
    if path is None:
        return ", ".join(leaf.files[:3]) or leaf.name
    now = _size_and_time(path)
    about = [path]
    old = next((size_and_time for file, *size_and_time in before["files"] if file == path), now)
    if now[0] != old[0]:
        about.append(f"{now[0]} bytes instead of {old[0]}")
    if now[1] != old[1]:
        about.append(f"modified {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now[1] / 1e9))}")
    return ", ".join(about)


def _spread(number: int, wanted: int) -> list[int]:
    """Evenly spaced numbers below `number`, with the first and the last: at least two, and all if enough are wanted.

    >>> _spread(5, 8), _spread(101, 3), _spread(10, 0), _spread(1, 2)
    ([0, 1, 2, 3, 4], [0, 50, 100], [0, 9], [0])
    """
    count = min(number, max(2, wanted))
    return sorted({place * (number - 1) // max(1, count - 1) for place in range(count)})


def _size_and_time(path: str) -> list[int]:
    """In bytes and nanoseconds; zeros if the file is gone."""
    with suppress(OSError):
        about = os.stat(path)
        return [about.st_size, about.st_mtime_ns]
    return [0, 0]


def _lengths_checksum(column: Array) -> int:
    checksum = 0
    for start in range(0, len(column), LENGTHS):
        checksum = zlib.crc32(numpy.ascontiguousarray(column[start : start + LENGTHS], dtype="<i4").data, checksum)
    return checksum


def _tags_checksum(dataset: Dataset, start: int, end: int) -> int | None:
    """None: one of them is that of a broken sequence, which has to be read for it."""
    try:
        return zlib.crc32(b"\0".join(dataset.tag_bytes(start, end).tolist()))
    except BrokenSequence:
        return None


def _read(leaf: DatasetPart, indices: Sequence[int], times: int = 1) -> tuple[dict[int, Values], set[str]]:
    """The sequences that can be read, and the data keys that are others when they are read again. Draws no random numbers.

    Args:
        times: how often they are read, each time with other random numbers.

    Raises:
        DataError: the files of the dataset cannot be read.
    """
    # Reading them in a batch says where; a broken sequence is an error then, unless skip_broken allows it.
    errors = (BrokenSequence,) if leaf.files else (Exception, SystemExit)
    values_by_index: dict[int, Values] = {}
    random: set[str] = set()
    for number in range(times):
        with own_numbers(number):
            for index in indices:
                with suppress(*errors):
                    arrays = leaf.dataset.sequence(index)
                    values = {key: (numpy.shape(arrays[key]), _numbers(numpy.asarray(arrays[key]))) for key in sorted(arrays)}
                    first = values_by_index.setdefault(index, values)
                    random |= {key for key in values if key not in first or not _is_close(first[key][1], values[key][1])}
    return values_by_index, random


def _checksum(dataset: Dataset, index: int, keys: Iterable[str]) -> int:
    """The checksum of both ends of a sequence, as older checkpoints have it."""
    try:
        with own_numbers(0):
            return _checksum_of(dataset.sequence(index), keys)
    except BrokenSequence:
        return 0


def _checksum_of(arrays: Mapping[str, Array], keys: Iterable[str]) -> int:
    """The checksum of both ends of arrays, the same on machines of either byte order."""
    checksum = 0
    for key in sorted(keys):
        values = arrays[key]
        if values.dtype == object:
            checksum = zlib.crc32("\0".join(map(str, values)).encode(errors="surrogateescape"), checksum)
            continue
        for some in _ends(values):
            checksum = zlib.crc32(numpy.ascontiguousarray(some, dtype=values.dtype.newbyteorder("<")).data, checksum)
    return checksum


def _ends(values: Array) -> tuple[Array, Array]:
    rows = max(1, ENDS // max(1, values[:1].nbytes))
    return values[:rows], values[-rows:]
