"""Identifies the data of a training, to notice if the training continues with other data.

For each dataset without others inside it, a checkpoint has checksums of all lengths, some tags and some values. Only these
decide: the same sequences in another folder, in another number of files or compressed are the same data. Sizes and times of
files only explain a difference.
"""

from __future__ import annotations

import os
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy

from hvdtrain.data.randomness import own_numbers
from hvdtrain.errors import BrokenSequence

if TYPE_CHECKING:
    from hvdtrain.data.dataset import Dataset
    from hvdtrain.data.types import Array

Identity = dict[str, Any]
"""Of a dataset, in plain values:

    name        the key of its dict in the config
    bounds      the index of the first sequence of every file, then the number of sequences
    files       of each its path, its size in bytes, and the time of its last modification in nanoseconds
    lengths     by data key, a checksum for every file
    tags        of some blocks: the index of the first sequence, that after the last one, and a checksum
    values      of some sequences: the index and a checksum
"""

TAGS, BLOCKS = 512, 16
"""The tags per block, and the number of blocks of all datasets together. Tags that are read from the sequences are sampled like
values instead."""

SEQUENCES = 64
"""The number of sequences whose values are read, of all datasets together."""

OWN_SEQUENCES = 8
"""The same of a dataset that the user's code may make, and that is read twice."""

ENDS = 32 << 10
"""The bytes at the beginning and at the end of a sequence that are compared."""

LENGTHS = 1 << 22
"""The number of lengths that are converted at once."""


@dataclass(frozen=True)
class DatasetPart:
    """A dataset without others inside it, and the files that it reads.

    Attributes:
        name: the key of its dict in the config.
    """

    name: str
    dataset: Dataset
    files: tuple[str, ...] = ()

    @property
    def bounds(self) -> list[int]:
        """As in `Dataset.file_bounds`."""
        return [int(bound) for bound in self.dataset.file_bounds()]

    def file_of(self, index: int) -> str | None:
        """The file that contains a sequence; None if unknown."""
        bounds = self.bounds
        return self.files[bisect_right(bounds, index) - 1] if len(bounds) == len(self.files) + 1 else None


def identify(parts: Sequence[DatasetPart]) -> list[Identity]:
    """The identities of the parts of a dataset. Raises: DataError, if they cannot be read."""
    found = [_identity(part, BLOCKS // len(parts), SEQUENCES // len(parts)) for part in parts]
    for part in parts:
        part.dataset.release()
    return found


def _identity(part: DatasetPart, blocks: int, sequences: int) -> Identity:
    dataset, number = part.dataset, part.dataset.num_sequences
    size, blocks = (1, sequences) if dataset.reads_for_tags else (TAGS, blocks)
    starts = [size * block for block in _spread(-(-number // size), blocks)]
    ends = [min(start + size, number) for start in starts]
    return {
        "name": part.name,
        "bounds": part.bounds,
        "files": [[path, *_size_and_time(path)] for path in part.files],
        "lengths": {
            key: [_lengths_checksum(column[a:b]) for a, b in pairwise(part.bounds)] for key, column in dataset.lengths.items()
        },
        "tags": [[a, b, _tags_checksum(dataset, a, b)] for a, b in zip(starts, ends, strict=True)],
        "values": [[index, _values_checksum(dataset, index, dataset.lengths)] for index in _sample(part, sequences)],
    }


def _sample(part: DatasetPart, wanted: int) -> list[int]:
    """Sequences whose values are compared: none of a dataset that is read from beginning to end, and of one without files only
    those that are the same when they are read again, as a user's dataset may change every time."""
    if part.dataset.has_fixed_order:
        return []
    if not part.files:
        spread = _spread(part.dataset.num_sequences, OWN_SEQUENCES)
        return [index for index in spread if steady_values(part.dataset, index) is not None]
    found = set(_spread(part.dataset.num_sequences, wanted))
    if len(part.bounds) <= wanted:
        found |= {(start + end) // 2 for start, end in pairwise(part.bounds) if start < end}
    return sorted(found)


def changes(before: Sequence[Identity], parts: Sequence[DatasetPart]) -> Iterator[str]:
    """The first change in each part, such as 'other values in sequence 'a' of train.hdf'.

    Raises:
        DataError: a part cannot be read.
    """
    if len(before) != len(parts):
        yield f"{len(parts)} datasets instead of {len(before)}"
        return
    by_name = {identity["name"]: identity for identity in before}
    for identity, part in zip(before, parts, strict=True):
        change = next(_differences(by_name.get(part.name, identity), part), None)
        if change is not None:
            yield change


def rewritten_files(before: Sequence[Identity], parts: Sequence[DatasetPart]) -> list[str]:
    """The files whose size or modification time has changed."""
    old = {path: about for identity in before for path, *about in identity["files"]}
    return [path for part in parts for path in part.files if path in old and old[path] != _size_and_time(path)]


def _differences(before: Identity, part: DatasetPart) -> Iterator[str]:
    """The changes in one part."""
    dataset, bounds = part.dataset, part.bounds
    if bounds[-1] != before["bounds"][-1]:
        now = numpy.diff(bounds).tolist()
        old = numpy.diff(before["bounds"]).tolist()
        place = next((place for place, (a, b) in enumerate(zip(old, now, strict=False)) if a != b), 0)
        if len(now) == len(old):
            yield f"{now[place]} sequences instead of {old[place]} in {_place(before, part, bounds[place])}"
        yield f"{bounds[-1]} sequences instead of {before['bounds'][-1]} in {part.name}"
        return
    for key, checksums in before["lengths"].items():
        if key not in dataset.lengths:
            yield f"no data key {key!r} in {_place(before, part, 0)}"
            return
        for (start, end), checksum in zip(pairwise(before["bounds"]), checksums, strict=True):
            if _lengths_checksum(dataset.lengths[key][start:end]) != checksum:
                yield f"other lengths of {key!r} in {_place(before, part, start)}"
    for start, end, checksum in before["tags"]:
        if _tags_checksum(dataset, start, end) != checksum:
            yield f"other tags in {_place(before, part, start)}"
    for index, checksum in before["values"]:
        if not part.dataset.has_fixed_order and _values_checksum(dataset, index, before["lengths"]) != checksum:
            yield f"other values in sequence {dataset.tags([index])[0]!r} of {_place(before, part, index)}"


Sample = tuple[str, str, list[float]]
"""Of a sequence the name, what has to be the same to the last bit, and sums that other processors may round otherwise."""


def sample_of(whole: Dataset, epoch: int) -> dict[str, Sample]:
    """Some sequences as they are in batches of an epoch, and the tags of blocks, by words for them. Raises: DataError.

    None of a dataset that is read from beginning to end, and no values that are others when they are read again.
    """
    found: dict[str, Sample] = {}
    dataset = whole.at_epoch(epoch)
    number = dataset.num_sequences
    for index in [] if dataset.has_fixed_order else _spread(number, OWN_SEQUENCES):
        arrays = steady_values(dataset, index)
        if arrays is None:
            continue
        exact = {name: values for name, values in arrays.items() if values.dtype.kind not in "fc"}
        sums = [total for name in sorted(arrays.keys() - exact.keys()) for total in _sums(arrays[name])]
        shapes = {name: arrays[name].shape for name in sorted(arrays)}
        text = f"{shapes}, checksum {_checksum_of(exact, exact):08x}"
        found[f"sequence {index}"] = dataset.tags([index])[0], text, sums
    for block in [] if dataset.reads_for_tags else _spread(-(-number // TAGS), BLOCKS):
        start, stop = TAGS * block, min(TAGS * (block + 1), number)
        found[f"tags of sequences {start} to {stop - 1}"] = "", f"checksum {_tags_checksum(dataset, start, stop):08x}", []
    return found


def as_close(own: Mapping[str, Sample], first: Mapping[str, Sample]) -> dict[str, str]:
    """This rank's sample as text, which is that of the first rank where only the rounding differs."""
    texts = {}
    for place, (tag, text, sums) in own.items():
        others = first[place][2] if place in first else []
        alike = len(sums) == len(others) and numpy.allclose(sums, others, rtol=1e-3, atol=1e-6, equal_nan=True)
        shown = " ".join(f"{total:.4g}" for total in (others if alike else sums))
        texts[place] = ", ".join([*([repr(tag)] if tag else []), text, *([f"sums {shown}"] if shown else [])])
    return texts


def _sums(values: Array) -> list[float]:
    """Of numbers that are not whole: of their absolute values, and of these by their places."""
    flat = numpy.abs(values.astype(numpy.complex128 if values.dtype.kind == "c" else numpy.float64)).ravel()
    return [float(flat.sum()), float(flat @ numpy.linspace(0.0, 1.0, len(flat)))]


def _place(before: Identity, part: DatasetPart, index: int) -> str:
    """The file that contains a sequence, and changes of its size and time."""
    path = part.file_of(index)
    if path is None:
        return ", ".join(part.files[:3]) or part.name
    now, about = _size_and_time(path), [path]
    old = next(([size, modified] for known, size, modified in before["files"] if known == path), now)
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
    """Size, and modification time in nanoseconds; zeros if the file is gone."""
    try:
        about = os.stat(path)
    except OSError:
        return [0, 0]
    return [about.st_size, about.st_mtime_ns]


def _lengths_checksum(column: Array) -> int:
    checksum = 0
    for start in range(0, len(column), LENGTHS):
        checksum = zlib.crc32(numpy.ascontiguousarray(column[start : start + LENGTHS], dtype="<i4").data, checksum)
    return checksum


def _tags_checksum(dataset: Dataset, start: int, end: int) -> int:
    return zlib.crc32(b"\0".join(dataset.tag_bytes(start, end).tolist()))


def steady_values(dataset: Dataset, index: int) -> dict[str, Array] | None:
    """A sequence's arrays; None: they are others when it is read again, or it cannot be read. Draws no random numbers."""
    try:
        with own_numbers(0):
            first = dataset.sequence(index)
        with own_numbers(1):
            again = dataset.sequence(index)
    except (Exception, SystemExit):  # reading it in a batch says where
        return None
    alike = first.keys() == again.keys() and all(numpy.array_equal(first[key], again[key]) for key in first)
    return first if alike else None


def _values_checksum(dataset: Dataset, index: int, keys: Iterable[str]) -> int:
    """The checksum of both ends of a sequence, the same on machines of either byte order."""
    try:
        return _checksum_of(dataset.sequence(index), keys)
    except BrokenSequence:  # reading it in a batch is an error, unless skip_broken allows it
        return 0


def _checksum_of(arrays: Mapping[str, Array], keys: Iterable[str]) -> int:
    checksum = 0
    for key in sorted(keys):
        values = arrays[key]
        if values.dtype == object:
            checksum = zlib.crc32("\0".join(map(str, values)).encode(errors="surrogateescape"), checksum)
            continue
        rows = max(1, ENDS // max(1, values[:1].nbytes))
        for some in (values[:rows], values[-rows:]):
            checksum = zlib.crc32(numpy.ascontiguousarray(some, dtype=values.dtype.newbyteorder("<")).data, checksum)
    return checksum
