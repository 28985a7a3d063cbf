"""DataLoaders of PyTorch: the items, how batches are made of them, and the order of a sampler."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import islice
from typing import Any

import numpy

from hvdtrain.data.foreign import is_map_style
from hvdtrain.data.formats.objects import Objects
from hvdtrain.data.held_generators import Generators
from hvdtrain.data.kinds import Adapter
from hvdtrain.data.randomness import EPOCH, mix_seed
from hvdtrain.data.types import imported_class
from hvdtrain.errors import ConfigError, DataError, Problem


def is_loader(value: Any) -> bool:
    """Whether a value of a config is a DataLoader of PyTorch."""
    return isinstance(value, imported_class("torch.utils.data", "DataLoader"))


def adapt(name: str, value: Any, defaults: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """As of `Adapter`: the items of a DataLoader in its order, unless the key batching sets another one."""
    if not is_loader(value):
        return value, []
    try:
        items, order = read_loader(name, value)
    except ConfigError as error:
        return value, [*error.problems]
    has_order = name == "train" and "seq_ordering" in defaults
    return {"class": lambda: items, **({} if has_order else {"seq_ordering": order})}, []


LOADERS = Adapter(adapt)


def read_loader(where: str, loader: Any) -> tuple[Any, Any]:
    """The items of a DataLoader with its `collate_fn` and its size of batches, and its order as the key seq_ordering.

    One that makes no batches (`batch_size=None`) is read as what its dataset yields, if that is an iterable; otherwise each item
    is a batch. The batches of a `batch_sampler` are taken as they are.

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
    sampler = loader.sampler
    max_seqs: int | None = 1
    if batches is None and is_usual(sampler):  # its items are batches, looked up by lists of numbers
        batches = sampler
        collate = partial(_looked_up, items.__getitem__, collate)
        items = range(len(items))
    elif batches is None:
        collate = partial(_only, where, collate)
    elif only_looks_up_several(items):
        collate = partial(_looked_up, items.__getitems__, collate)
        items = range(len(items))
    warnings = _warnings(loader, batches)
    if batches is None or is_usual(batches):
        sampler, max_seqs = (sampler, 1) if batches is None else (batches.sampler, batches.batch_size)
        items, order = _order_of(where, sampler, items)
        return Objects(items, collate, None, loader.num_workers, max_seqs, warnings), order
    return Objects(items, collate, None, loader.num_workers, None, warnings), SamplerBatches(where, batches, len(items))


def is_usual(sampler: Any) -> bool:
    """Whether a sampler of batches cuts them from the order of another sampler, as PyTorch's own."""
    of_torch: Any = sys.modules["torch.utils.data"]
    return isinstance(sampler, of_torch.BatchSampler) and type(sampler).__iter__ is of_torch.BatchSampler.__iter__


def only_looks_up_several(items: Any) -> bool:
    """Whether a dataset has `__getitems__`, which returns the items of several numbers, but no `__getitem__`."""
    if isinstance(items, imported_class("torch.utils.data", "Subset")):
        return only_looks_up_several(items.dataset)
    return callable(getattr(items, "__getitems__", None)) and not is_map_style(items)


def refused(where: str, reason: str, advice: str) -> ConfigError:
    return ConfigError.of(
        "unsupported",
        f"{where}: expected a DataLoader whose batches hvdtrain can plan, so that each item comes once in an epoch over all "
        f"ranks, got one with {reason} ({advice})",
    )


def _only(where: str, convert: Any, items: list[Any]) -> Any:
    """The only item of a batch, which is a batch itself. Raises: DataError."""
    if len(items) != 1:
        raise DataError(
            f"{where}: expected max_seqs = 1, as each item of this DataLoader (batch_size=None) is a batch, got {len(items)}"
        )
    return convert(items[0])


def _looked_up(look_up: Callable[[list[int]], Any], convert: Callable[[Any], Any], numbers: list[int]) -> Any:
    return convert(look_up(numbers))


def _order_of(where: str, sampler: Any, items: Any) -> tuple[Any, Any]:
    """The items that a sampler takes, and their order. Raises: ConfigError, if it does not take each item once."""
    of_torch: Any = sys.modules["torch.utils.data"]
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
    order = SamplerOrder(where, sampler, len(items))
    if isinstance(sampler, of_torch.WeightedRandomSampler) or not order.has_length:
        advice = "seq_ordering is the order, each item has to come once, and a MixingDataset draws with weights"
        raise refused(where, f"the sampler {type(sampler).__name__}", advice)
    return items, order


class SamplerOrder:
    """The key seq_ordering: the order of a sampler, which depends on nothing but the epoch, so that a resumed training has it.

    A sampler without `set_epoch` is read once for each epoch up to the one that is asked for, as a loop does: it may count them.

    Args:
        where: the config key, for messages.
        size: the number of items.
        first_epoch: the number of the first epoch for `set_epoch`.

    Raises:
        ConfigError: the sampler is for one rank, or can be read only once.
    """

    def __init__(self, where: str, sampler: Any, size: int, first_epoch: int = 0) -> None:
        self._where = where
        self._sampler = sampler
        self._size = size
        self._first_epoch = first_epoch
        self._latest: tuple[int, Any, list[Any]] | None = None  # an epoch, the sampler after it, and its order
        if "Distributed" in self._kind:
            raise refused(where, f"the sampler {self._kind}", "hvdtrain gives each rank its part: leave the sampler out")
        if isinstance(sampler, Iterator):
            raise refused(
                where, f"a {self._kind} as its sampler", "a list, or an object with __iter__, can be read in every epoch"
            )

    @property
    def __name__(self) -> str:
        return self._kind

    @property
    def has_length(self) -> bool:
        """Whether it is as long as the data, if its length is known."""
        return not hasattr(self._sampler, "__len__") or len(self._sampler) == self._size

    def __call__(self, *, epoch: int, **_: Any) -> Any:
        """Raises: DataError, if it does not have each item once, or another order when it is asked again."""
        return numpy.array(self._order(epoch), dtype=numpy.int64)

    def _order(self, epoch: int) -> list[Any]:
        is_first = self._latest is None
        if self._latest is None or self._latest[0] != epoch:
            self._latest = self._read(epoch)
            self._check(self._latest[2])
        if is_first and self._latest[2] != self._read(epoch, anew=True)[2]:
            raise DataError(
                f"{self._where}: expected a sampler whose order follows from the epoch (set_epoch) and seeded random numbers, "
                f"got another order by {self._kind} when it was asked again"
            )
        return self._latest[2]

    def _read(self, epoch: int, anew: bool = False) -> tuple[int, Any, list[Any]]:
        counts = not hasattr(self._sampler, "set_epoch")
        if counts and not anew and self._latest is not None and self._latest[0] < epoch:
            done, sampler, _ = self._latest
        else:
            done = 0 if counts else epoch - 1
            sampler = copied(self._sampler)
        order: list[Any] = []
        for number in range(done + 1, epoch + 1):
            if not counts:
                sampler.set_epoch(number - 1 + self._first_epoch)
            Generators(sampler).seed(mix_seed(EPOCH, number))
            try:
                order = self._elements(islice(sampler, self._size + 1))
            except TypeError as error:
                raise DataError(f"{self._where}: expected {self._expected} from {self._kind}, got others: {error}") from error
        return epoch, sampler, order

    @property
    def _kind(self) -> str:
        return type(self._sampler).__name__

    _expected = "numbers of items (those of whole batches belong into the batch_sampler)"

    def _elements(self, read: Iterable[Any]) -> list[Any]:
        return [int(index) for index in read]

    def _check(self, order: list[Any]) -> None:
        if sorted(order) != list(range(self._size)):
            raise DataError(
                f"{self._where}: expected a sampler with each of the {self._size} items once, got others by {self._kind}"
            )


class SamplerBatches(SamplerOrder):
    """The key seq_ordering: the batches of a sampler, as they are. It may leave out items."""

    def __call__(self, *, epoch: int, **_: Any) -> list[list[int]]:
        """Raises: DataError, if an item comes twice, or the batches are others when it is asked again."""
        return self._order(epoch)

    _expected = "lists of numbers of items"

    def _elements(self, read: Iterable[Any]) -> list[Any]:
        return [[int(index) for index in batch] for batch in read]

    def _check(self, order: list[Any]) -> None:
        indices = [index for batch in order for index in batch]
        is_unique = len(set(indices)) == len(indices)
        if not all(order) or not is_unique or min(indices, default=-1) < 0 or max(indices) >= self._size:
            raise DataError(
                f"{self._where}: expected batches with each of the {self._size} items at most once, got others by {self._kind} "
                "(a function as seq_ordering may repeat items)"
            )


def copied(sampler: Any) -> Any:
    """A sampler with copies of the samplers, lists and arrays in it, which reading may change, but not of the data."""
    changed = copy(sampler)
    if hasattr(changed, "__dict__"):
        vars(changed).update({name: _copied_inside(value) for name, value in vars(sampler).items()})
    return changed


def _copied_inside(value: Any, depth: int = 2) -> Any:
    if isinstance(value, imported_class("torch.utils.data", "Sampler")):
        return copied(value)
    if isinstance(value, imported_class("torch", "Tensor")):
        return value.clone()
    if isinstance(value, (set, deque, numpy.ndarray)):
        return value.copy()
    if depth and type(value) is dict:
        return {name: _copied_inside(member, depth - 1) for name, member in value.items()}
    if depth and type(value) is list:
        return [_copied_inside(member, depth - 1) for member in value]
    return value


def _warnings(loader: Any, batches: Any) -> tuple[str, ...]:
    """What a DataLoader does and hvdtrain does not."""
    warnings = []
    if batches is not None and is_usual(batches) and batches.drop_last:
        warnings.append("drop_last: every item is trained on in each epoch; the last batch may be smaller")
    if loader.worker_init_fn is not None:
        warnings.append("worker_init_fn is not called: items have their own random numbers")
    return tuple(warnings)
