"""Keeping what was read in memory, within a budget: `cache_size`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.data.types import Array, Dataset, Stream

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

PER_ARRAY = 160
"""Bytes that Python and numpy need for a kept array besides its values."""


def parse_sizes(value: int | str | Sequence[int | str]) -> list[int | None]:
    """Budgets in bytes for train, dev and eval: 0 none, None unlimited. Raises: ValueError.

    >>> parse_sizes("2G"), parse_sizes([0, "1M"]), parse_sizes("-1,1K,0")
    ([2147483648, 0, 0], [0, 1048576, 0], [None, 1024, 0])
    """
    parts: list[Any] = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else list(value)
    if len(parts) > 3:
        raise ValueError(value)
    sizes = [_bytes(str(part).strip()) for part in parts]
    return sizes + [0] * (3 - len(sizes))


def _bytes(text: str) -> int | None:
    unit = UNITS.get(text[-1:].upper(), 1)
    size = float(text[:-1] if unit > 1 else text)
    return None if size < 0 else int(size * unit)


class CachedDataset:
    """A dataset that remembers sequences it was asked for, until its budget is used up.

    Data keys that are memory-mapped are not kept: the page cache of the system holds them already, once for all ranks.
    Nothing is thrown out again, as each sequence is needed once an epoch: whatever has a place saves the same reading.
    So the cache serves any order and any part of the data, from epoch to epoch.

    Args:
        budget: bytes, counted with all keys in their own types; None: no limit.
    """

    def __init__(self, dataset: Dataset, budget: int | None) -> None:
        self._dataset = dataset
        self._budget = budget
        self._kept: dict[int, dict[str, Array]] = {}
        self._mapped = frozenset(getattr(dataset, "mapped", ()))
        self.used = 0
        self.streams: Mapping[str, Stream] = dataset.streams
        self.lengths: Mapping[str, Array] = dataset.lengths

    @property
    def num_sequences(self) -> int:
        return self._dataset.num_sequences

    @property
    def num_kept(self) -> int:
        """How many sequences are in memory."""
        return len(self._kept)

    def sequence(self, index: int) -> dict[str, Array]:
        kept = self._kept.get(index)
        if kept is not None:
            return dict(kept)
        sequence = self._dataset.sequence(index)
        size = sum(array.nbytes + PER_ARRAY for key, array in sequence.items() if key not in self._mapped)
        if self._budget is None or self.used + size <= self._budget:
            self._kept[index] = sequence
            self.used += size
        return dict(sequence)

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._dataset.tags(indices)

    def close(self) -> None:
        self._kept = {}
        self._dataset.close()

    def how_read(self) -> str:
        """For the log."""
        budget = "as much as there is" if self._budget is None else f"up to {self._budget / (1 << 20):.0f} MB per rank"
        how = getattr(self._dataset, "how_read", lambda: "")()
        return f"{how}; cached: {budget}"


def with_cache(dataset: Dataset, budget: int | None) -> Dataset:
    """The dataset with a cache of that budget, where it has something to gain from one."""
    needs_none = set(dataset.streams) <= set(getattr(dataset, "mapped", ()))
    return dataset if budget == 0 or needs_none else CachedDataset(dataset, budget)
