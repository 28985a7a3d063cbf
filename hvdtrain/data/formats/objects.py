"""Items of any kind, which the user's `collate` makes batches of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy

from hvdtrain.data.dataset import Dataset, as_lengths, read_item
from hvdtrain.data.types import ITEMS, Array, Batch, Stream
from hvdtrain.errors import DataError


@dataclass(frozen=True)
class Objects:
    """Items, and how batches are made of them.

    Attributes:
        items: has `__len__` and `__getitem__`.
        collate: returns, for a list of items, what `train_step` gets.
        lengths: of the items, or a function that returns them; None: those that the items have as an attribute or a method, or 1.
        num_workers: the number of processes that read items; 0: none.
        max_seqs: the number of items in a batch if no key sets it.
        warnings: for the log.
    """

    items: Any
    collate: Callable[[list[Any]], Any]
    lengths: Any = None
    num_workers: int = 0
    max_seqs: int | None = None
    warnings: tuple[str, ...] = ()


class ObjectsDataset(Dataset):
    """Items of any kind, each a sequence.

    Args:
        where: the config key, for messages.

    Attributes:
        num_workers: as in `Objects`.

    Raises:
        DataError: the lengths are not those of the items.
    """

    collate: Callable[[list[Any]], Any]

    def __init__(self, where: str, objects: Objects) -> None:
        self._where = where
        self._items = objects.items
        self._size = len(objects.items)
        self.num_workers = objects.num_workers
        self.collate = objects.collate
        self.max_seqs = objects.max_seqs
        self._warnings = objects.warnings
        self.streams = {ITEMS: Stream(numpy.dtype(object), (), 0, sparse=False)}
        self.lengths = {ITEMS: self._lengths(objects.lengths)}
        self.memory_mapped = frozenset(self.streams)  # `cache_size` is for arrays

    @property
    def num_sequences(self) -> int:
        return self._size

    def sequence(self, index: int) -> dict[str, Array]:
        """The item, as the only entry of an array of objects."""
        boxed = numpy.empty(1, object)
        boxed[0] = read_item(self._where, self._items, index)
        return {ITEMS: boxed}

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [f"seq-{index}" for index in indices]

    def collated(self, batch: Batch) -> Batch:
        return replace(batch, tree=collate_items(self._where, self.collate, batch.data[ITEMS].values), collate=self.collated)

    def how_read(self) -> str:
        return f"items, batches by {getattr(self.collate, '__qualname__', type(self.collate).__name__)}"

    def warnings(self) -> list[str]:
        return [*self._warnings]

    def _lengths(self, lengths: Any) -> Array:
        lengths = getattr(self._items, "lengths", None) if lengths is None else lengths
        lengths = lengths() if callable(lengths) else lengths
        if lengths is None:
            return numpy.ones(self._size, numpy.int32)
        if isinstance(lengths, Mapping):
            lengths = next(iter(lengths.values()))
        return as_lengths(self._where, lengths, self._size)


def collate_items(where: str, collate: Callable[[list[Any]], Any], values: Array) -> Any:
    """What `collate` makes of a batch's items, an array of objects of shape (batch, 1).

    It gets copies of items that `item.pop("label")` would change: it may be called again for them, and those of a list are needed
    in the next epoch, too.

    Raises:
        DataError: it made nothing.
    """
    tree = collate([copy(item) if isinstance(item, (MutableMapping, list)) else item for item in values[:, 0]])
    if tree is None:
        raise DataError(f"{where}.collate: expected a batch of {len(values)} items, got None (BrokenSequence leaves out an item)")
    return tree
