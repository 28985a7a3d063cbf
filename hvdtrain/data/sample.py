"""A few rounds of an epoch that stand for all of it: to try what a training takes without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy

from hvdtrain.data.balance import rearranged
from hvdtrain.data.plan import Plan
from hvdtrain.data.types import Array


@dataclass(frozen=True)
class Rounds:
    """The rounds of an epoch, in each of which every rank takes a batch, but for the last, which may be incomplete.

    Attributes:
        lengths: by data key, the frames of what the plan's indices speak of.
        size: batches of the plan in a round.
    """

    plan: Plan
    lengths: Mapping[str, Array]
    size: int

    def __len__(self) -> int:
        return -(-self.plan.num_batches // self.size)

    @cached_property
    def costs(self) -> Array:
        """What the largest batch of every round has in padded frames, summed over data keys; shape (rounds,)."""
        return self._by_round(self.plan.padded(self.lengths))

    def largest(self) -> list[int]:
        """The round with the batch of most padded frames; then the one with the longest sequence, where that is another."""
        longest = self._by_round(self.plan.longest(self.lengths))
        return list(dict.fromkeys(int(column[: self._num_full].argmax()) for column in (self.costs, longest)))

    def spread(self, count: int) -> list[int]:
        """Rounds at equal distances from the smallest to the largest, at random places of the epoch."""
        by_cost = numpy.argsort(self.costs[: self._num_full], kind="stable")
        count = min(count, len(by_cost))
        return [int(by_cost[int((number + 0.5) * len(by_cost) / count)]) for number in range(count)]

    def only(self, rounds: Sequence[int]) -> Plan:
        """The plan of an epoch of some full rounds, in this order."""
        batches = [batch for number in rounds for batch in range(number * self.size, (number + 1) * self.size)]
        there = numpy.array([batch for batch in batches if batch < self.plan.num_batches], dtype=numpy.int64)
        return Plan(*rearranged(self.plan.order, self.plan.bounds, there))

    def told(self, number: int) -> str:
        """The largest batch of a round, in words."""
        frames = self.plan.padded(self.lengths)
        batches = numpy.arange(number * self.size, min((number + 1) * self.size, self.plan.num_batches))
        batch = batches[numpy.sum(list(frames.values()), axis=0)[batches].argmax()]
        padded = ", ".join(f"{column[batch]} of {name}" for name, column in frames.items())
        return f"{len(self.plan.batch(batch))} sequences, padded frames: {padded}"

    @property
    def _num_full(self) -> int:
        """Rounds in which no rank is left without a batch; the only one, where there is no other."""
        return max(self.plan.num_batches // self.size, 1)

    def _by_round(self, columns: Mapping[str, Array]) -> Array:
        """The sum over data keys, of each round's largest batch."""
        of_batches = numpy.sum(list(columns.values()), axis=0)
        missing = len(self) * self.size - len(of_batches)
        by_round: Array = numpy.pad(of_batches, (0, missing)).reshape(len(self), self.size)
        return numpy.asarray(by_round.max(axis=1))
