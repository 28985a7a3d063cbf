"""DataLoaders of PyTorch: the items, how batches are made of them, and the order of a sampler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import islice
from typing import Any

import numpy

from hvdtrain.data.formats.objects import Objects
from hvdtrain.data.held_generators import Generators
from hvdtrain.data.randomness import EPOCH, mix_seed
from hvdtrain.data.types import Array, imported_class
from hvdtrain.errors import ConfigError, DataError


def is_loader(value: Any) -> bool:
    """Whether a value of a config is a DataLoader of PyTorch."""
    return isinstance(value, imported_class("torch.utils.data", "DataLoader"))


def read_loader(where: str, loader: Any) -> tuple[Any, Any]:
    """The items of a DataLoader with its `collate_fn` and its size of batches, and its order as the key seq_ordering.

    One that makes no batches (`batch_size=None`) is read as what its dataset yields, if that is an iterable; otherwise each item
    is a batch.

    Raises:
        ConfigError: it has something that hvdtrain's plan of an epoch cannot have.
    """
    of_torch: Any = sys.modules["torch.utils.data"]
    batches = loader.batch_sampler
    items = loader.dataset
    collate = loader.collate_fn
    if type(loader).__iter__ is not of_torch.DataLoader.__iter__:
        raise refused(where, f"{type(loader).__name__}.__iter__ of its own", "give its dataset and collate_fn")
    if isinstance(items, of_torch.IterableDataset):
        if batches is None:
            return items, "default"
        advice = "set its batch_size to None, or give the dataset itself: hvdtrain makes the batches"
        raise refused(where, "an IterableDataset", advice)
    if not hasattr(items, "__len__"):
        advice = "give a dataset of single items, and collate; cuts of Lhotse: {'class': 'LhotseDataset', 'cuts': cuts}"
        raise refused(where, f"a {type(items).__name__} without __len__", advice)
    size = 1
    sampler = loader.sampler
    if batches is None and type(sampler) is of_torch.BatchSampler:  # its items are batches, looked up by lists of numbers
        batches, collate, items = sampler, partial(_looked_up, items, collate), range(len(items))
    elif batches is None:
        collate = partial(_only, where, collate)
    if batches is not None:
        if type(batches) is not of_torch.BatchSampler:
            advice = "give its dataset and collate_fn; batch_size and seq_ordering make batches"
            raise refused(where, f"the batch_sampler {type(batches).__name__}", advice)
        size, sampler = batches.batch_size, batches.sampler
    items, order = _order_of(where, sampler, items)
    return Objects(items, collate, None, loader.num_workers, size, tuple(_warnings(loader, batches))), order


def refused(where: str, what: str, advice: str) -> ConfigError:
    return ConfigError.of(
        "unsupported",
        f"{where}: expected a DataLoader whose batches hvdtrain can plan, so that each item comes once in an epoch over all "
        f"ranks, got one with {what} ({advice})",
    )


def _only(where: str, convert: Any, items: list[Any]) -> Any:
    """The only item of a batch, which is a batch itself. Raises: DataError."""
    if len(items) != 1:
        raise DataError(
            f"{where}: expected max_seqs = 1, as each item of this DataLoader (batch_size=None) is a batch, got {len(items)}"
        )
    return convert(items[0])


def _looked_up(dataset: Any, convert: Any, numbers: list[int]) -> Any:
    return convert(dataset[numbers])


def _order_of(where: str, sampler: Any, items: Any) -> tuple[Any, Any]:
    """The items that a sampler takes, and their order. Raises: ConfigError, if it does not take each item once."""
    of_torch: Any = sys.modules["torch.utils.data"]
    kind = type(sampler).__name__
    if type(sampler) is of_torch.RandomSampler:
        if sampler.replacement or sampler.num_samples != len(items):
            raise refused(where, "a RandomSampler that draws with replacement or another number", "leave the sampler out")
        return items, "random"
    if type(sampler) is of_torch.SubsetRandomSampler:
        return of_torch.Subset(items, list(sampler.indices)), "random"
    if type(sampler) is of_torch.SequentialSampler:
        if len(sampler) != len(items):
            advice = "give a torch.utils.data.Subset"
            raise refused(where, f"a SequentialSampler of {len(sampler)} of {len(items)} items", advice)
        return items, "default"
    if isinstance(sampler, Sequence):
        return of_torch.Subset(items, list(sampler)), "default"
    if "Distributed" in kind:
        raise refused(where, f"the sampler {kind}", "hvdtrain gives each rank its part: leave the sampler out")
    order = SamplerOrder(where, sampler, len(items))
    if isinstance(sampler, of_torch.WeightedRandomSampler) or not order.has_length:
        advice = "seq_ordering is the order, each item has to come once, and a MixingDataset draws with weights"
        raise refused(where, f"the sampler {kind}", advice)
    return items, order


class SamplerOrder:
    """The key seq_ordering: the order of a sampler, which depends on nothing but the epoch, so that a resumed training has it."""

    def __init__(self, where: str, sampler: Any, size: int) -> None:
        self._where = where
        self._sampler = sampler
        self._size = size
        self._is_checked = False

    @property
    def has_length(self) -> bool:
        """Whether it is as long as the data, if its length is known."""
        return not hasattr(self._sampler, "__len__") or len(self._sampler) == self._size

    def __call__(self, *, epoch: int, **_: Any) -> Array:
        """Raises: DataError, if it does not have each item once, or another order when it is asked again."""
        order = self._indices(epoch)
        kind = type(self._sampler).__name__
        if not numpy.array_equal(numpy.sort(order), numpy.arange(self._size)):
            raise DataError(f"{self._where}: expected a sampler with each of the {self._size} items once, got others by {kind}")
        if not self._is_checked and not numpy.array_equal(order, self._indices(epoch)):
            raise DataError(
                f"{self._where}: expected a sampler whose order follows from the epoch (set_epoch) and seeded random numbers, "
                f"got another order by {kind} when it was asked again"
            )
        self._is_checked = True
        return order

    def _indices(self, epoch: int) -> Array:
        sampler = copy(self._sampler)  # one that counts epochs itself begins anew
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch - 1)  # loops count from 0
        Generators(sampler).seed(mix_seed(EPOCH, epoch))
        return numpy.array([int(index) for index in islice(sampler, self._size + 1)], dtype=numpy.int64)


def _warnings(loader: Any, batches: Any) -> list[str]:
    """What a DataLoader does and hvdtrain does not."""
    warnings = []
    if batches is not None and batches.drop_last:
        warnings.append("drop_last: every item is trained on in each epoch; the last batch may be smaller")
    if loader.worker_init_fn is not None:
        warnings.append("worker_init_fn is not called: items have their own random numbers")
    return warnings
