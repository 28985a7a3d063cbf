"""Datasets of users' classes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.types import Array, imported_class
from hvdtrain.errors import DataError


def as_dataset(opened: Any) -> Dataset | None:
    """What a config's class or function returned, as a dataset; None if it does not provide the lengths of its sequences."""
    if isinstance(opened, Dataset):
        return opened
    required = ("streams", "lengths", "num_sequences", "sequence", "tags")
    return ForeignDataset(opened) if all(hasattr(opened, name) for name in required) else None


def is_map_style(value: Any) -> bool:
    """Whether a value is a map-style dataset: it has a length and returns item i. Dicts and strings are not."""
    if isinstance(value, (str, bytes, Mapping, type, imported_class("torch.utils.data", "IterableDataset"))):
        return False
    return not _missing_methods(value)


def is_iterable(value: Any) -> bool:
    """Whether a value of a config is an iterable to read, not a string, dict, list or class."""
    return hasattr(type(value), "__iter__") and not isinstance(value, (str, bytes, Mapping, list, tuple, set, frozenset, type))


def refuse_batches(where: str, iterable: Any) -> None:
    """Raises: DataError, if an iterable is a DataLoader that makes batches."""
    if hasattr(iterable, "collate_fn") and getattr(iterable, "batch_size", None) is not None:
        raise DataError(
            f"{where}: expected items, got a {type(iterable).__name__} of batches (hvdtrain makes the batches: in place of it, "
            "give its dataset, with its collate_fn as the entry collate)"
        )


def needs_epoch(function: partial[Any]) -> bool:
    """Whether a config's function requires the number of the epoch, so that it must be called for each."""
    if not inspect.isroutine(function.func) or "epoch" in function.keywords:
        return False
    try:
        epoch = inspect.signature(function.func).parameters.get("epoch")
    except (TypeError, ValueError):  # a function in C
        return False
    return epoch is not None and epoch.default is inspect.Parameter.empty


def takes_epoch(source: Any) -> bool:
    """Whether an iterable, or a function that returns one, gets the epoch, so that its items may differ between epochs."""
    if is_iterable(source):
        return hasattr(source, "set_epoch")
    values = source.keywords if isinstance(source, partial) else {}
    try:
        return "epoch" in inspect.signature(source).parameters and "epoch" not in values
    except (TypeError, ValueError):  # a function in C
        return False


def describe(value: Any) -> str:
    """A value that is not a dataset, for messages.

    >>> describe(5), describe({1, 2})
    ('int', 'set without __getitem__')
    """
    missing = _missing_methods(value)
    return f"{type(value).__name__} without {missing[0]}" if len(missing) == 1 else type(value).__name__


def _missing_methods(value: Any) -> list[str]:
    """The methods of a map-style dataset that a value does not have. (That of PyTorch's base class only raises.)"""
    of_base = getattr(imported_class("torch.utils.data", "Dataset"), "__getitem__", None)
    return [name for name in ("__len__", "__getitem__") if getattr(type(value), name, of_base) is of_base]


METHODS = (
    *(("close",), ("release",), ("sequences",), ("padded",), ("packed",), ("how_read",), ("warnings",)),
    *(("tag_bytes", "all_tags"), ("file_bounds", "group_bounds"), ("selected", "drawn")),
)
"""The optional methods of a `Dataset`, each with its name of earlier releases if that was another one."""


def _value(value: Any, *_: Any) -> Any:
    """The result of a method that the user's class has as an attribute."""
    return value


class ForeignDataset(Dataset):
    """An object with the members of a `Dataset` whose class does not derive from it.

    It needs `streams`, `lengths`, `num_sequences`, `sequence` and `tags`. All other members are optional, methods or attributes.
    They may have their names of earlier releases: those of `EARLIER_NAMES`, `all_tags(start, stop)` for `tag_bytes`, and
    `group_bounds` for `file_bounds`.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.streams = inner.streams
        self.lengths = inner.lengths
        self.memory_mapped = frozenset(self._member("memory_mapped", "mapped") or ())
        self.is_stochastic = any(hasattr(inner, name) for name in ("at_epoch", "selected", "drawn"))
        self.is_stochastic |= bool(self._member("is_stochastic", "varies"))
        self.has_fixed_order = bool(self._member("has_fixed_order", "own_order"))
        self.reads_for_tags = bool(self._member("reads_for_tags"))
        self.window = self._member("window")
        self.reads_batches = any(hasattr(inner, name) for name in ("sequences", "padded", "packed"))
        for names in METHODS:
            member = self._member(*names)
            if member is not None:
                setattr(self, names[0], member if callable(member) else partial(_value, member))

    @property
    def num_sequences(self) -> int:
        return int(self._inner.num_sequences)

    def sequence(self, index: int) -> dict[str, Array]:
        return self._inner.sequence(index)  # type: ignore[no-any-return]  # here and below: as the contract says

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._inner.tags(indices)  # type: ignore[no-any-return]

    def at_epoch(self, epoch: int) -> Dataset:
        of_epoch = self._member("at_epoch")
        changed = self if of_epoch is None else of_epoch(epoch)
        return changed if isinstance(changed, Dataset) else ForeignDataset(changed)

    def _member(self, *names: str) -> Any:
        """What the object has under the first of these names that it has; None: it has none of them."""
        return next((getattr(self._inner, name) for name in names if hasattr(self._inner, name)), None)
