"""Items of any kind, which the user's `collate` makes batches of: what a DataLoader of PyTorch reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy

from hvdtrain.data.dataset import Dataset, as_lengths, read_item
from hvdtrain.data.types import Array, Batch, Stream
from hvdtrain.errors import ConfigError, DataError

KEY = "data"
"""The data key of the items."""


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
        self.streams = {KEY: Stream(numpy.dtype(object), (), 0, sparse=False)}
        self.lengths = {KEY: self._lengths(objects.lengths)}
        self.memory_mapped = frozenset(self.streams)  # `cache_size` is for arrays

    @property
    def num_sequences(self) -> int:
        return self._size

    def sequence(self, index: int) -> dict[str, Array]:
        """The item, as the only entry of an array of objects."""
        boxed = numpy.empty(1, object)
        boxed[0] = read_item(self._where, self._items, index)
        return {KEY: boxed}

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [f"seq-{index}" for index in indices]

    def collated(self, batch: Batch) -> Batch:
        return replace(batch, tree=collate_items(self._where, self.collate, batch.data[KEY].values), collate=self.collated)

    def how_read(self) -> str:
        return f"items, batches by {getattr(self.collate, '__qualname__', type(self.collate).__name__)}"

    def warnings(self) -> list[str]:
        return [*self._warnings]

    def _lengths(self, given: Any) -> Array:
        given = getattr(self._items, "lengths", None) if given is None else given
        given = given() if callable(given) else given
        if given is None:
            return numpy.ones(self._size, numpy.int32)
        if isinstance(given, Mapping):
            given = next(iter(given.values()))
        return as_lengths(self._where, given, self._size)


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


def is_loader(value: Any) -> bool:
    """Whether a value of a config is a DataLoader of PyTorch that makes batches."""
    of_torch = sys.modules.get("torch.utils.data")
    if of_torch is None or not isinstance(value, of_torch.DataLoader):
        return False
    return value.batch_sampler is not None


def read_loader(where: str, loader: Any) -> tuple[Objects, str]:
    """The items of a DataLoader with its `collate_fn` and its size of batches, and the order of its sampler.

    Raises:
        ConfigError: it has something that hvdtrain's plan of an epoch cannot have.
    """
    of_torch: Any = sys.modules["torch.utils.data"]
    batches, items = loader.batch_sampler, loader.dataset

    def refuse(what: str, advice: str) -> ConfigError:
        return ConfigError.of(
            "unsupported",
            f"{where}: expected a DataLoader whose batches hvdtrain can plan, so that each item comes once in an epoch over all "
            f"ranks, got one with {what} ({advice})",
        )

    if type(loader).__iter__ is not of_torch.DataLoader.__iter__:
        raise refuse(f"{type(loader).__name__}.__iter__ of its own", "give its dataset and collate_fn")
    if isinstance(items, of_torch.IterableDataset):
        raise refuse("an IterableDataset", "set its batch_size to None, or give the dataset itself: hvdtrain makes the batches")
    if type(batches) is not of_torch.BatchSampler:
        kind = type(batches).__name__
        raise refuse(f"the batch_sampler {kind}", "give its dataset and collate_fn; batch_size and seq_ordering make batches")
    sampler, order = batches.sampler, "default"
    if type(sampler) is of_torch.RandomSampler:
        order = "random"
        if sampler.replacement or sampler.num_samples != len(items):
            raise refuse("a RandomSampler that draws with replacement or another number", "leave the sampler out")
    elif type(sampler) is of_torch.SubsetRandomSampler:
        items, order = of_torch.Subset(items, list(sampler.indices)), "random"
    elif type(sampler) is not of_torch.SequentialSampler:
        advice = (
            "hvdtrain gives each rank its part: leave the sampler out"
            if "Distributed" in type(sampler).__name__
            else ("seq_ordering is the order, and a MixingDataset draws with weights")
        )
        raise refuse(f"the sampler {type(sampler).__name__}", advice)
    elif len(sampler) != len(items):
        raise refuse(f"a SequentialSampler of {len(sampler)} of {len(items)} items", "give a torch.utils.data.Subset")
    warnings = tuple(_warnings(loader))
    return Objects(items, loader.collate_fn, None, loader.num_workers, batches.batch_size, warnings), order


def _warnings(loader: Any) -> list[str]:
    """What a DataLoader does and hvdtrain does not."""
    found = []
    if loader.batch_sampler.drop_last:
        found.append("drop_last: every item is trained on in each epoch; the last batch may be smaller")
    if loader.worker_init_fn is not None:
        found.append("worker_init_fn is not called: items have their own random numbers")
    return found
