"""Keeping what was read in memory, within a budget: `cache_size`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy

from hvdtrain.data.batches import pad
from hvdtrain.data.combine.tags import tag_bytes
from hvdtrain.data.types import Array, Dataset, Padded, Stream

PER_ARRAY, PER_SEQUENCE = 144, 180
"""Bytes that Python and numpy need for a kept array besides its values, and for a sequence besides its arrays."""


class Budget:
    """Bytes that several datasets may keep together; None: no limit.

    Args:
        within: a larger budget that others draw on, too.

    Attributes:
        size: of the tighter of the two budgets; used: so much of it is taken.
        caches: who draws on it.
    """

    def __init__(self, size: int | None, within: Budget | None = None) -> None:
        self._own = size
        self._within = within
        self.used = 0
        self.caches: list[CachedDataset] = []

    @property
    def size(self) -> int | None:
        sizes = [size for size in (self._own, self._within.size if self._within is not None else None) if size is not None]
        return min(sizes, default=None)

    def is_cut(self, wanted: int) -> bool:
        """Whether less than was asked for, and than is wanted, is there, for the sake of others."""
        there = None if self._within is None else self._within.size
        return there is not None and there < min(wanted, wanted if self._own is None else self._own)

    def take(self, size: int) -> bool:
        """Take so many bytes, if they are there."""
        if self._own is not None and self.used + size > self._own:
            return False
        if self._within is not None and not self._within.take(size):
            return False
        self.used += size
        return True

    def part(self, count: int) -> Budget:
        """What each of some processes that are forked later may keep."""
        if count == 1 or self.size is None:
            return self
        part = Budget(self.size // count)
        part.caches = self.caches
        return part


class CachedDataset:
    """A dataset that remembers sequences it was asked for, until its budget is used up.

    It stands directly around what reads files, below whatever joins, maps or cuts sequences: those go their own ways of
    making batches, and a function over sequences is called in every epoch anew.

    Data keys that are memory-mapped are not kept: the page cache of the system holds them already, once for all ranks.
    Nothing is thrown out again, as each sequence is needed once an epoch: whatever has a place saves the same reading.
    So the cache serves any order and any part of the data, from epoch to epoch.

    Args:
        budget: counted with all keys in their own types.
    """

    def __init__(self, dataset: Dataset, budget: Budget) -> None:
        self._dataset = dataset
        self._budget = budget
        self._kept: dict[int, tuple[Array, ...]] = {}  # by data key, in the order of the streams: smaller than dicts
        self.mapped: frozenset[str] = frozenset(getattr(dataset, "mapped", ()))
        self.streams: Mapping[str, Stream] = dataset.streams
        self.lengths: Mapping[str, Array] = dataset.lengths
        budget.caches.append(self)

    @property
    def num_sequences(self) -> int:
        return self._dataset.num_sequences

    @property
    def num_kept(self) -> int:
        """How many sequences are in memory."""
        return len(self._kept)

    @property
    def group_bounds(self) -> Array:
        """Where each file's sequences begin, and where those of the last one end, if the dataset has several."""
        whole = numpy.array([0, self.num_sequences], dtype=numpy.int64)
        bounds: Array = getattr(self._dataset, "group_bounds", whole)
        return bounds

    def size(self) -> int:
        """Bytes that keeping everything would take; texts count as pointers."""
        total = PER_SEQUENCE * self.num_sequences
        for name in self.streams.keys() - self.mapped:
            total += int(self.lengths[name].sum(dtype=numpy.int64)) * frame_size(self.streams[name])
            total += PER_ARRAY * self.num_sequences
        return total

    def sequence(self, index: int) -> dict[str, Array]:
        return dict(zip(self.streams, self._arrays(index), strict=True))

    def padded(self, indices: Array) -> dict[str, Padded]:
        """Some sequences as a batch."""
        sequences = [self._arrays(index) for index in indices.tolist()]
        return {name: pad([arrays[place] for arrays in sequences]) for place, name in enumerate(self.streams)}

    def _arrays(self, index: int) -> tuple[Array, ...]:
        """The arrays of a sequence in the order of the streams; kept from now on, if there is room."""
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        read = self._dataset.sequence(index)
        arrays = tuple(read[name] for name in self.streams)
        size = sum(_size(read[name]) for name in self.streams if name not in self.mapped)
        if self._budget.take(PER_SEQUENCE + size):
            arrays = tuple(
                array if name in self.mapped else _own(array) for name, array in zip(self.streams, arrays, strict=True)
            )
            self._kept[index] = arrays
        return arrays

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._dataset.tags(indices)

    def all_tags(self, start: int = 0, stop: int | None = None) -> Array:
        """The tags of sequences `start` to before `stop` as UTF-8: numpy bytes of shape (number,)."""
        return tag_bytes(self._dataset, start, self.num_sequences if stop is None else stop)

    def close(self) -> None:
        self._kept = {}
        self._dataset.close()

    def how_read(self) -> str:
        """For the log."""
        how = getattr(self._dataset, "how_read", lambda: "")()
        return "; ".join([how, "cached"] if how else ["cached"])


def with_cache(dataset: Dataset, budget: Budget) -> Dataset:
    """The dataset with a cache, where it has something to gain from one."""
    needs_none = set(dataset.streams) <= set(getattr(dataset, "mapped", ()))
    changes = hasattr(dataset, "at_epoch") or hasattr(dataset, "drawn")  # what it gives is good for an epoch only
    return dataset if budget.size == 0 or needs_none or changes else CachedDataset(dataset, budget)


def frame_size(stream: Stream) -> int:
    """Bytes of a frame."""
    return stream.dtype.itemsize * int(numpy.prod(stream.shape, dtype=numpy.int64))


def _size(array: Array) -> int:
    """Bytes that keeping an array takes; a text counts with all of its letters."""
    texts = sum(len(text) for text in array.ravel().tolist()) if array.dtype == object else 0
    return array.nbytes + texts + PER_ARRAY


def _own(array: Array) -> Array:
    """The array, or a copy where it is a piece of something larger, which would be kept with it. Nobody may change it."""
    kept = array.copy() if array.base is not None else array
    kept.flags.writeable = False
    return kept


def host_memory() -> int | None:
    """Bytes of memory that this host, or the control group that this process is in, has left; None: it does not say."""
    left = [_available(Path("/proc/meminfo"))]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, place = line.split(":", 2)
            if number == "0":  # version 2; a limit may be that of a group around this one
                group = Path("/sys/fs/cgroup") / place.strip("/")
                left += [_left_in(folder) for folder in (group, *group.parents) if (folder / "memory.max").exists()]
    except (OSError, ValueError):
        pass
    return min((size for size in left if size is not None), default=None)


def _available(meminfo: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def _left_in(group: Path) -> int | None:
    """Of a control group's limit, what is not taken by memory other than that of the page cache."""
    try:
        limit = int((group / "memory.max").read_text())
        taken = int((group / "memory.current").read_text())
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - taken + int(files.get("file", 0)))
    except (OSError, ValueError):  # "max" where there is no limit
        return None
