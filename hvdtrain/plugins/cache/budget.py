"""Caching sequences in memory within a budget: `cache_size`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy

from hvdtrain.data.cache import Cache
from hvdtrain.data.combine.user_code import UserDataset
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.files import size_text
from hvdtrain.data.keys import DatasetSpec
from hvdtrain.data.padding import same_values
from hvdtrain.data.types import Array
from hvdtrain.data.views import ChangedSequences
from hvdtrain.plugins.cache import CacheKeys, parse_sizes
from hvdtrain.runtime.memory import host_memory

if TYPE_CHECKING:
    from hvdtrain.settings import Settings

MEMORY_SHARE = 0.8
"""The share of a host's free memory that the caches of its ranks may use together."""

PER_ARRAY = 144
"""Bytes that Python and numpy need for a cached array besides its values."""

PER_SEQUENCE = 180
"""The same for a sequence besides its arrays."""

CHECKED = 64
"""How many cached sequences of the user's code are read again, to see whether they are the same."""


class Budget(Cache):
    """Bytes that several datasets together may cache; None: no limit.

    Args:
        within: a larger budget that this one shares with others.
        processes: how many have a budget of this size each.

    Attributes:
        size: the smaller of the two limits, for one process.
        used: the bytes in use.
        caches: the datasets that draw on this budget.
    """

    def __init__(self, size: int | None, within: Budget | None = None, processes: int = 1) -> None:
        self._limit = size
        self._within = within
        self._processes = processes
        self.used = 0
        self.caches: list[CachedDataset] = []

    @property
    def size(self) -> int | None:
        outer = None if self._within is None else self._within.size
        sizes = [self._limit, None if outer is None else outer // self._processes]
        return min((size for size in sizes if size is not None), default=None)

    def is_limited_by_host(self, wanted: int) -> bool:
        """Whether the larger budget leaves less than both this one's limit and the wanted bytes."""
        available = None if self._within is None else self._within.size
        return available is not None and available < min(wanted, wanted if self._limit is None else self._limit)

    def take(self, size: int) -> bool:
        """Take some bytes; False if fewer are left."""
        if self._limit is not None and self.used + size > self._limit:
            return False
        if self._within is not None and self._processes == 1 and not self._within.take(size):
            return False
        self.used += size
        return True

    def reserve(self, wanted: int) -> None:
        """Take what several processes may need to cache a dataset, or what is left: once forked, none knows what others use."""
        if self._within is not None and self._processes > 1:
            self._limit = (self._limit or 0) + self._within.take_up_to(self._processes * wanted) // self._processes

    def take_up_to(self, wanted: int) -> int:
        """Take some bytes, or as many as are left. Returns their number."""
        wanted_here = wanted if self._limit is None else min(wanted, self._limit - self.used)
        granted = wanted_here if self._within is None else self._within.take_up_to(wanted_here)
        self.used += granted
        return granted

    def needed(self) -> tuple[int, int]:
        """The bytes that would hold all sequences of these datasets, and those of them that may be used."""
        whole = sum(cache.size() for cache in self.caches)
        return whole, whole if self.size is None else min(whole, self.size)

    def shared_by(self, processes: int) -> Budget:
        if processes == 1 or self.size is None:
            return self
        share = Budget(None, within=self, processes=processes)
        share.caches = self.caches
        return share

    def keep(self, dataset: Dataset) -> Dataset:
        all_mapped = dataset.streams.keys() <= dataset.memory_mapped
        return dataset if self.size == 0 or all_mapped or dataset.is_stochastic else CachedDataset(dataset, self)

    def lines(self, local_size: int) -> list[str]:
        if self.size == 0:
            return []
        if not self.caches:
            return ["no cache: all data is memory-mapped; the system caches it for all ranks of the host"]
        whole, size = self.needed()
        per_host = f"{size_text(size)} per rank, {size_text(local_size * size)} on this host"
        more = ", more than the host has" if self.is_limited_by_host(whole) else ""
        return [f"cache: up to {per_host}; {size_text(whole)} would hold all of it{more}"]

    def summary(self) -> str:
        if self.size == 0 or not self.caches:
            return ""
        whole, size = self.needed()
        return f"cache: {size_text(size)} of {size_text(whole)} per rank"


class CachedDataset(ChangedSequences):
    """A dataset that caches the sequences it reads until its budget is used up.

    It wraps the dataset that reads files, below those that join, map or cut sequences: these make batches differently, and a
    function over sequences is called anew in every epoch.

    Memory-mapped data keys are not cached: the page cache of the system already holds them, once for all ranks.
    Nothing is evicted: as each sequence is needed once per epoch, every cached sequence saves the same amount of reading.
    So the cache serves any order and any part of the data, from epoch to epoch.

    Only `at_epoch` caches: what is read before, such as for lengths, is read by other processes than those of an epoch.
    """

    def __init__(self, dataset: Dataset, budget: Budget) -> None:
        super().__init__(dataset)
        self._budget = budget
        self._of_epoch = False
        # The user's code may draw from its own generators, which nothing shows but sequences that differ.
        self._doubted: dict[int, None] = dict.fromkeys(range(CHECKED)) if isinstance(dataset, UserDataset) else {}
        self._varies = threading.Event()
        self._cached: dict[int, tuple[Array, ...]] = {}  # by data key, in the order of the streams: smaller than dicts
        budget.caches.append(self)
        budget.reserve(self.size())

    def size(self) -> int:
        """Bytes that caching everything would take; texts count as pointers."""
        total = PER_SEQUENCE * self.num_sequences
        for name in self.streams.keys() - self.memory_mapped:
            total += int(self.lengths[name].sum(dtype=numpy.int64)) * self.streams[name].frame_size
            total += PER_ARRAY * self.num_sequences
        return total

    def at_epoch(self, epoch: int) -> Self:
        changed = super().at_epoch(epoch)
        changed._of_epoch = True
        return changed

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        streams = self.streams
        return [dict(zip(streams, self._arrays(index), strict=True)) for index in indices]

    def _arrays(self, index: int) -> tuple[Array, ...]:
        """The arrays of a sequence in the order of the streams; cached from now on if the budget allows."""
        cached = self._cached.get(index)
        if cached is not None and not self._is_random and not self._doubted:
            return cached
        read = self._dataset.sequence(index)
        arrays = tuple(read[name] for name in self.streams)
        if cached is not None and self._doubted:
            self._doubted.popitem()
            if not all(same_values(*pair) for pair in zip(cached, arrays, strict=True)):
                self._varies.set()
                self._cached.clear()
        if self._is_random or not self._of_epoch or cached is not None:
            return arrays
        size = sum(_size(read[name]) for name in self.streams if name not in self.memory_mapped)
        if self._budget.take(PER_SEQUENCE + size):
            arrays = tuple(
                array if name in self.memory_mapped else _detach(array) for name, array in zip(self.streams, arrays, strict=True)
            )
            self._cached[index] = arrays
        return arrays

    @property
    def _is_random(self) -> bool:
        return self._varies.is_set() or self._dataset.is_stochastic

    def close(self) -> None:
        self._cached = {}
        super().close()

    def how_read(self) -> str:
        return "; ".join(filter(None, [self._dataset.how_read(), "cached"]))


def _size(array: Array) -> int:
    """Bytes that caching an array takes; a text counts with all of its characters."""
    texts = sum(len(text) for text in array.ravel().tolist()) if array.dtype == object else 0
    return array.nbytes + texts + PER_ARRAY


def _detach(array: Array) -> Array:
    """A read-only copy: a view would keep all of its base in memory, and the array may be one that the user's code keeps."""
    detached = array.copy()
    detached.flags.writeable = False
    return detached


def caches_of(settings: Settings, specs: Sequence[DatasetSpec], local_size: int) -> list[Budget]:
    """The budgets of datasets, within the free memory of the host, which its ranks share."""
    sizes = parse_sizes(settings.of(CacheKeys).cache_size)
    by_name = {"train": sizes[0], "dev": sizes[1]}
    wanted = [by_name.get(spec.name, sizes[2]) if spec.cache_byte_size is None else spec.cache_byte_size for spec in specs]
    memory = host_memory() if any(size != 0 for size in wanted) else None
    host = Budget(None if memory is None else int(MEMORY_SHARE * memory) // local_size)
    return [Budget(size, within=host) for size in wanted]
