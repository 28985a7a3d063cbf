"""The keys of an epoch's order, and the method, the seed and the part of the data of an epoch that follow from them.

Imports no numpy, like every file that declares keys: `--help` imports them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, Literal
from zlib import crc32

from hvdtrain.config.convert import signature_error
from hvdtrain.config.keys import Rule, key, not_negative, parsed_by, positive
from hvdtrain.errors import DataError

METHODS = (
    "default",
    "reverse",
    "default_every_n",
    "sorted",
    "sorted_reverse",
    "random",
    "random_sample",
    "sort_bin_shuffle",
    "sort_bin_shuffle_x2",
    "laplace",
    "random_blocks",
)

WITH_BINS = ("sort_bin_shuffle", "sort_bin_shuffle_x2", "laplace")

CHANGES = {
    2: ("laplace", "laplace cuts its bins as RETURNN does now; before, the first bins were longer by one sequence"),
    3: ("seq_list_filter_file", "seq_list_filter_file is applied after partition_epoch, as in RETURNN; before, it came first"),
    4: ("partition_epoch", "lengths that depend on the epoch no longer change the parts of partition_epoch, which overlapped"),
}
"""By version of the orders, the method or the key that changed with it, and how."""

ORDER_VERSION = max(CHANGES)
"""Checkpoints within an epoch contain it, so that a training can explain why an epoch no longer has the batches it began with."""


def is_order(method: object) -> bool:
    """Whether a value of the key seq_ordering is a function, or a text that `parse` accepts."""
    return callable(method) or parsed_by(parse)(str(method))


@dataclass(frozen=True, kw_only=True)
class OrderKeys:
    """The order of a dataset's sequences and how they are cut into epochs. Keys inside the dicts `train`, `dev`, ..."""

    seq_ordering: str | Callable[..., str] = key(
        "default",
        "order of the sequences: default, reverse, default_every_n:N, sorted, sorted_reverse, random, random_sample, "
        "sort_bin_shuffle, sort_bin_shuffle_x2, laplace (these three take :BINS or :.SEQUENCES_PER_BIN), "
        "random_blocks:SEQUENCES_PER_BLOCK; or a function {signature} that returns one of these, or all indices in order (an "
        "array), or the batches (a list of lists of indices)",
        Rule(f"one of {', '.join(METHODS)}, with :NUMBER or :.NUMBER where it takes one", is_order),
        signature="*, epoch, **_",
    )
    seq_list_filter_file: str | None = key(
        None, "use only the sequences whose tags this file lists, one per line (text, or .gz); applied after partition_epoch"
    )
    partition_epoch: int = key(1, "cut the ordered sequences into this many parts; an epoch is one part", positive)
    partition_by: Literal["sequences", "files"] = key(
        "sequences",
        "what partition_epoch cuts: with 'files' an epoch consists of some of the dataset's files, which come in random order if "
        "seq_ordering is random; their sequences are ordered by seq_ordering",
    )
    repeat_epoch: int = key(1, "how many times an epoch goes through its sequences", positive)
    max_batches: int | Callable[..., Any] | None = key(
        None,
        "an epoch has only its first N batches of each rank; a number, or a function {signature} that returns it; None: all",
        positive,
        signature="*, epoch, **_",
    )
    fixed_random_seed: int | None = key(None, "the same random order in every epoch, from this seed", not_negative)
    random_seed_offset: int = key(0, "added to the seed of the order, which is the number of the full epoch", not_negative)


@dataclass(frozen=True)
class Method:
    """A parsed `seq_ordering`: its name, the number of bins or sequences per bin, and the number of full epochs that keep
    an order."""

    name: str
    bins: int | None = None
    per_bin: int | None = None
    keep: int = 1

    @property
    def is_random(self) -> bool:
        """Whether the order depends on the seed."""
        return "random" in self.name or self.name in WITH_BINS


@dataclass(frozen=True)
class GivenOrder(Method):
    """What a function of the config has returned: the indices of all sequences, each once, or those of its batches.

    Attributes:
        indices: int64, one batch after the other.
        bounds: as in `Plan`; None: keys limit the batches.
    """

    indices: Any = field(default=None, compare=False, repr=False)
    bounds: Any = field(default=None, compare=False, repr=False)
    checksum: int = 0


def parse(text: str) -> Method:
    """Parse `laplace:.1000`, `random:3`, ... Raises: ValueError.

    The number after `random:`, and the last number of the others, is the number of full epochs that keep an order.

    >>> parse("laplace:.1000")
    Method(name='laplace', bins=None, per_bin=1000, keep=1)
    """
    name, *numbers = text.split(":")
    if name not in METHODS:
        raise ValueError(text)
    bins = per_bin = None
    if name in WITH_BINS and numbers:
        first = numbers.pop(0)
        if first.startswith("."):
            per_bin = int(first[1:])
        else:
            bins = int(first)
    if name in ("default_every_n", "random_blocks"):
        if not numbers:
            raise ValueError(text)
        number = int(numbers.pop(0))
        bins, per_bin = (number, None) if name == "default_every_n" else (None, number)
    keep = int(numbers.pop(0)) if numbers and name in ("random", "random_sample", "random_blocks", *WITH_BINS) else 1
    if numbers or min(number for number in (bins, per_bin, keep, 1) if number is not None) < 1:
        raise ValueError(text)
    return Method(name, bins, per_bin, keep)


def non_default(keys: OrderKeys) -> dict[str, Any]:
    """The order keys whose value differs from the default."""
    default = OrderKeys()
    names = [field.name for field in fields(OrderKeys)]
    return {name: getattr(keys, name) for name in names if getattr(keys, name) != getattr(default, name)}


def is_random(keys: OrderKeys) -> bool:
    """Whether the order may depend on the seed; always True for a function, whose result is not known in advance."""
    if callable(keys.seq_ordering):
        return True
    return keys.fixed_random_seed is None and parse(keys.seq_ordering).is_random


def method_of(keys: OrderKeys, epoch: int) -> Method:
    """The method that orders the sequences of an epoch. Raises: DataError, if a function of the config returns an unknown one."""
    text = keys.seq_ordering
    if not callable(text):
        return parse(text)
    value = call_for_epoch("seq_ordering", text, epoch)
    if _are_indices(value):
        import numpy  # here, as `--help` imports this file without it

        if keys.partition_epoch > 1:  # all parts are cut from the same order
            value = call_for_epoch("seq_ordering", text, full_epoch(keys, epoch))
        indices = numpy.asarray(value)
        return GivenOrder("indices", indices=indices, checksum=crc32(indices.tobytes()))
    if isinstance(value, list):
        return _given_batches(value, epoch)
    if not isinstance(value, str) or not is_order(value):
        raise DataError(
            f"seq_ordering: expected the function to return one of {', '.join(METHODS)} (with :NUMBER or :.NUMBER where it takes "
            f"one), an array of indices, or a list of batches, got {value!r} for epoch {epoch}"
        )
    return parse(value)


def _are_indices(value: Any) -> bool:
    """Whether a function returned an array or a tensor, or numbers in order, not batches or the name of a method.

    >>> _are_indices(range(3)), _are_indices([2, 0, 1]), _are_indices([[2, 0], [1]]), _are_indices("random")
    (True, True, False, False)
    """
    if hasattr(value, "dtype"):
        return True
    return isinstance(value, (range, list, tuple)) and len(value) > 0 and all(isinstance(each, Integral) for each in value)


def _given_batches(batches: list[Any], epoch: int) -> GivenOrder:
    """Raises: DataError, if they are not lists of indices."""
    import numpy  # here, as `--help` imports this file without it

    try:
        indices = [numpy.asarray(batch, dtype=numpy.int64) for batch in batches]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"seq_ordering: expected batches that are lists of indices for epoch {epoch}, got others: {error}"
        ) from None
    if not indices or any(batch.ndim != 1 or not len(batch) for batch in indices):
        raise DataError(f"seq_ordering: expected batches of at least one index for epoch {epoch}, got an empty one, or none")
    joined = numpy.concatenate(indices)
    bounds = numpy.cumsum([0, *map(len, indices)], dtype=numpy.int64)
    return GivenOrder("batches", indices=joined, bounds=bounds, checksum=crc32(bounds.tobytes(), crc32(joined.tobytes())))


def order_text(keys: OrderKeys, epoch: int) -> str:
    """The value of seq_ordering in an epoch, as text. Raises: DataError."""
    if not callable(keys.seq_ordering):
        return keys.seq_ordering
    method = method_of(keys, epoch)
    if isinstance(method, GivenOrder):
        return f"{method.name} with the checksum {method.checksum}"
    return str(call_for_epoch("seq_ordering", keys.seq_ordering, epoch))


def call_for_epoch(name: str, function: Callable[..., Any], epoch: int) -> Any:
    """What a function of the config returns for an epoch: the same on all ranks and whenever it is asked, also if it draws random
    numbers. Raises: DataError, if it does not take the epoch."""
    if signature_error(function, "*, epoch, **_"):
        raise DataError(
            f"{name}: expected a function that takes epoch=... (such as def {name}(*, epoch, **_)), got one with the arguments "
            f"{inspect.signature(function, follow_wrapped=False)}"
        )
    from hvdtrain.data.randomness import EPOCH, own_numbers  # here, as `--help` imports this file without numpy

    with own_numbers(EPOCH, epoch):
        return function(epoch=epoch)


def limit_of(keys: OrderKeys, epoch: int) -> int | None:
    """The number of batches of each rank in an epoch; None: all. Raises: DataError."""
    setting = keys.max_batches
    limit = call_for_epoch("max_batches", setting, epoch) if callable(setting) else setting
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise DataError(
            f"max_batches: expected the function to return a positive number or None, got {limit!r} for epoch {epoch}"
        )
    return limit


def changed_since(version: int, keys: OrderKeys, epoch: int) -> str:
    """How the order of an epoch has changed since a version of the orders; '' if it has not. Raises: DataError.

    >>> changed_since(1, OrderKeys(seq_ordering="random"), 3)
    ''
    """
    in_use = {method_of(keys, epoch).name, *non_default(keys)}
    return "; ".join(how for number, (changed, how) in CHANGES.items() if number > version and changed in in_use)


def seed_of(keys: OrderKeys, epoch: int) -> int:
    """The seed of an epoch's order, the same for all parts of a full epoch, and for all full epochs that keep the order."""
    if keys.fixed_random_seed is not None:
        return keys.fixed_random_seed
    return (full_epoch(keys, epoch) - 1) // method_of(keys, epoch).keep + 1 + keys.random_seed_offset


def full_epoch(keys: OrderKeys, epoch: int) -> int:
    """The number of the full epoch (counted from 1) of an epoch: `partition_epoch` epochs make a full one."""
    return (epoch - 1) // keys.partition_epoch + 1


def part_of(keys: OrderKeys, epoch: int) -> int:
    """The number of an epoch within its full epoch, counted from 0."""
    return (epoch - 1) % keys.partition_epoch
