"""The sequences of an epoch that mixes several datasets: how many of each, which ones, and at which place.

The sequences of a part form an endless stream: one pass through the part after the other, each in a new order. An epoch takes
the next piece of every stream, so that nothing is used twice before everything was used once. The pieces are then merged such
that, from the beginning to the end of the epoch, every part has the same share of what was done.

All of it is arithmetic on the lengths, the keys and the number of the epoch, so that every rank knows the whole epoch, and a
training can resume anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy

from hvdtrain.data.plan.order import laplace, num_bins, order_all, partition, random_blocks, sorting_integers
from hvdtrain.data.plan.order_keys import Method, OrderKeys, full_epoch, method_of, part_of, seed_of
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

Stop = Literal["first", "all"] | int

MIXED = (
    "random",
    "default",
    "reverse",
    "laplace",
    "random_blocks",
    "sorted",
    "sorted_reverse",
    "sort_bin_shuffle",
    "sort_bin_shuffle_x2",
)
"""The methods that can order an epoch that mixes datasets."""

PASSES_TOGETHER = 4096
"""Passes through a small part of a mix are drawn together, as far as they have this many sequences: a generator for each would
take longer than all else."""


@dataclass(frozen=True)
class WeightedMix:
    """The parts of a dataset, and how an epoch mixes them.

    Attributes:
        where: the config key of the dataset, for messages.
        bounds: by name of a part, the index of its first sequence, and that after its last one.
        weights: by name of a part, its share of an epoch, in any unit; None: its size.
        temperature: weights are raised to the power of 1 / temperature.
        by: what the weights are shares of.
        stop: the epoch ends when the first part was used once, when all parts were, or after this many sequences or frames.
    """

    where: str
    bounds: Mapping[str, tuple[int, int]]
    weights: Mapping[str, float] | None = None
    temperature: float = 1.0
    by: Literal["sequences", "frames"] = "sequences"
    stop: Stop = "all"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.bounds)

    def parts_of(self, indices: Array) -> Array:
        return numpy.searchsorted([end for _, end in self.bounds.values()], indices, side="right")

    @property
    def needs_lengths(self) -> bool:
        return self.by == "frames"

    def text(self) -> str:
        weights = "by size" if self.weights is None else dict(self.weights)
        return f"{weights}, temperature {self.temperature:g}, by {self.by}, stop {self.stop!r}, parts {dict(self.bounds)}"

    def order(self, lengths: Array, keys: OrderKeys, epoch: int, subset: Array) -> Array:
        return order_mixed(lengths, keys, epoch, self, subset)

    def shares(self, lengths: Array, subset: Array) -> str:
        datasets = mixed_datasets(self, lengths, subset)
        total = sum(dataset.quota for dataset in datasets)
        shares = [
            f"{dataset.quota} of {dataset.name} ({dataset.quota / total:.1%}, {dataset.passes:.3g} times all)"
            for dataset in datasets
        ]
        return f"{self.by} in a full epoch: {total}: {', '.join(shares)}"


@dataclass(frozen=True)
class MixedDataset:
    """What an epoch takes of a dataset.

    Attributes:
        members: the indices of its sequences in use; int64.
        costs: of each, 1 or its number of frames; int64.
        quota: the costs that an epoch takes. Every epoch takes the same, up to half a sequence.
    """

    name: str
    members: Array
    costs: Array
    quota: int

    @property
    def passes(self) -> float:
        """How often an epoch goes through it."""
        return self.quota / int(self.costs.sum())


def mixed_datasets(mix: WeightedMix, lengths: Array, subset: Array | None) -> list[MixedDataset]:
    """What an epoch takes of every dataset.

    Args:
        lengths: number of frames of every sequence.
        subset: indices of the sequences in use, ascending; None: all of them.

    Raises:
        DataError: no sequence of one is in use, or an epoch has none.
    """
    members = []
    costs = []
    for name, (first, end) in mix.bounds.items():
        within = numpy.arange(first, end) if subset is None else subset[(subset >= first) & (subset < end)]
        if not len(within):
            raise DataError(f"{mix.where}.datasets.{name}: expected at least one sequence to mix, got none in use")
        members.append(within.astype(numpy.int64, copy=False))
        frames = numpy.maximum(lengths[within], 1).astype(numpy.int64)  # one without frames takes a place, too
        costs.append(frames if mix.by == "frames" else numpy.ones(len(within), dtype=numpy.int64))
    quotas = _quotas(mix, [int(column.sum()) for column in costs])
    return [MixedDataset(*fields) for fields in zip(mix.bounds, members, costs, quotas, strict=True)]


def _quotas(mix: WeightedMix, sizes: list[int]) -> list[int]:
    """How many sequences, or frames, an epoch takes of every part. Raises: DataError, if it takes none of one."""
    weights = sizes if mix.weights is None else [mix.weights[name] for name in mix.bounds]
    # Exact fractions: a share of 0.7 of 1000 must not become 699.
    shares = [Fraction(str(weight)) if mix.temperature == 1 else Fraction(weight ** (1 / mix.temperature)) for weight in weights]
    if isinstance(mix.stop, int):
        quotas = apportion(shares, mix.stop)
    else:
        bound = min if mix.stop == "first" else max
        whole = bound(Fraction(size) / share for size, share in zip(sizes, shares, strict=True))
        # The one that ends the epoch is used exactly once; rounding must not take more or less of another one than there is.
        quotas = [bound(round(whole * share), size) for size, share in zip(sizes, shares, strict=True)]
    for name, quota in zip(mix.bounds, quotas, strict=True):
        if quota < 1:
            raise DataError(
                f"{mix.where}.weights: expected at least one of every dataset in an epoch, got none of {name} in {sum(quotas)} "
                f"{mix.by}"
            )
    return quotas


def apportion(shares: list[Fraction], total: int) -> list[int]:
    """Integers in proportion to the shares with this sum: rounded down, then one more for the largest remainders.

    >>> apportion([Fraction("0.7"), Fraction("0.3")], 1001)
    [701, 300]
    """
    exact = [share * total / sum(shares) for share in shares]
    counts = [int(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: counts[place] - exact[place])
    for place in by_remainder[: total - sum(counts)]:
        counts[place] += 1
    return counts


Passes = Callable[[int, int, range], Array]
"""Given the number of a dataset, its size and the numbers of passes: their orders, of shape (passes, sequences)."""


def mix_epoch(datasets: list[MixedDataset], full_epoch: int, passes: Passes) -> Array:
    """The indices of the sequences of a full epoch (counted from 1), in an even mix; int64."""
    drawn = []
    places = []
    for number, dataset in enumerate(datasets):
        end = full_epoch * dataset.quota
        begin = end - dataset.quota
        size = int(dataset.costs.sum())
        some = range(begin // size, (end - 1) // size + 1)
        order = passes(number, len(dataset.members), some).reshape(-1)
        costs = dataset.costs[order]
        # The middle of a sequence decides on the epoch that it belongs to, and on its place there; twice of it is an integer.
        middles = 2 * (some.start * size + numpy.cumsum(costs)) - costs
        here = (middles >= 2 * begin) & (middles < 2 * end)
        drawn.append(dataset.members[order[here]])
        places.append((middles[here] - 2 * begin) / (2 * dataset.quota))
    return numpy.concatenate(drawn)[numpy.argsort(numpy.concatenate(places), kind="stable")]


def order_mixed(lengths: Array, keys: OrderKeys, epoch: int, mix: WeightedMix, subset: Array | None = None) -> Array:
    """The indices of the sequences of one epoch that mixes several parts: as `order`, at an even rate of every part.

    Every part is ordered by itself. Methods that sort all sequences of an epoch by length mix the parts by length, and `laplace`
    sorts within its bins only.
    """
    method = method_of(keys, epoch)
    if method.name not in MIXED or keys.partition_by == "files":
        got = method.name if method.name not in MIXED else "partition_by = 'files'"
        raise DataError(f"{mix.where}.seq_ordering: expected one of {', '.join(MIXED)} for a MixingDataset, got {got}")

    def passes(dataset: int, size: int, numbers: range) -> Array:
        seed = [keys.random_seed_offset, dataset] if keys.fixed_random_seed is None else [keys.fixed_random_seed, dataset]
        return _pass_orders(size, numbers, method, seed, keys.fixed_random_seed is not None)

    mixed = mix_epoch(mixed_datasets(mix, lengths, subset), full_epoch(keys, epoch), passes)
    if method.name == "laplace":
        mixed = mixed[laplace(sorting_integers(lengths[mixed]), numpy.arange(len(mixed)), num_bins(method, len(mixed)))]
    elif method.name not in ("random", "random_blocks"):
        mixed = mixed[order_all(lengths[mixed], method, seed_of(keys, epoch))]
    indices = partition(mixed, keys.partition_epoch, part_of(keys, epoch))
    return numpy.tile(indices, keys.repeat_epoch) if keys.repeat_epoch > 1 else indices


def _pass_orders(size: int, numbers: range, method: Method, seed: list[int], is_fixed: bool) -> Array:
    """The orders of some passes through a dataset of a mix, int64 of shape (passes, size); `is_fixed`: all have the same."""
    if not method.is_random:
        return numpy.tile(numpy.arange(size), (len(numbers), 1))
    drawn = numpy.array([0 if is_fixed else number // method.keep for number in numbers])
    together = 1 if method.name == "random_blocks" else max(1, PASSES_TOGETHER // size)
    orders = {}
    for group in numpy.unique(drawn // together).tolist():
        generator = numpy.random.RandomState([*seed, group])
        if method.name == "random_blocks":
            orders[group] = random_blocks(size, generator, method.per_bin or 1)[None]
        else:
            orders[group] = numpy.argsort(generator.random_sample((together, size)), axis=1, kind="stable")
    return numpy.stack([orders[number // together][number % together] for number in drawn.tolist()])
