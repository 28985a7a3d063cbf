"""The history of a training: learning rate and scores of the finished epochs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, isfinite, nan

META = ":meta:"
"""The prefix of entries in learning rate files that are metadata, not scores."""


@dataclass
class UsedRates:
    """The learning rates that the optimizer used in the updates of an epoch so far.

    >>> rates = UsedRates()
    >>> for rate in (0.25, 0.75, 0.5):
    ...     rates.add(rate)
    >>> rates.last, rates.summary()
    (0.5, {'first': 0.25, 'lowest': 0.25, 'highest': 0.75, 'mean': 0.5})
    """

    updates: int = 0
    first: float = 0.0
    last: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    total: float = 0.0

    def add(self, rate: float) -> None:
        if not self.updates:
            self.first = self.lowest = self.highest = rate
        self.updates += 1
        self.last = rate
        self.lowest = min(self.lowest, rate)
        self.highest = max(self.highest, rate)
        self.total += rate

    def summary(self) -> dict[str, float] | None:
        """The first, lowest and highest rate and their mean; None if all are the same."""
        if self.lowest == self.highest:
            return None
        return {"first": self.first, "lowest": self.lowest, "highest": self.highest, "mean": self.total / self.updates}


@dataclass(frozen=True)
class EpochRecord:
    """The record of a finished epoch.

    Attributes:
        learning_rate: the rate before a schedule scales it in each step.
        scores: by name, such as 'dev_loss_ce'.
        losses: the scale of each loss that the epoch minimized, by its name in train_step; empty: unknown, as in checkpoints of
            earlier releases and other programs.
        is_updated: whether an update was applied; otherwise all were skipped, and the epoch is never the best.
        is_diverged: whether its loss is so large that the training has diverged: it is never the best either.
    """

    epoch: int
    learning_rate: float
    scores: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    is_updated: bool = field(default=True, kw_only=True)
    is_diverged: bool = field(default=False, kw_only=True)

    @property
    def comparable(self) -> dict[str, float]:
        """The scores by which the epoch may be among the best: NaN in place of what is not finite, or was not trained for."""
        counts = self.is_updated and not self.is_diverged
        return {name: score if counts and isfinite(score) else nan for name, score in self.scores.items()}

    @property
    def at_step(self) -> int | None:
        """The number of steps of the training at an evaluation within the epoch; None: the epoch was finished."""
        return None

    @property
    def age(self) -> tuple[int, float]:
        """A sort key: later records compare larger."""
        return self.epoch, inf if self.at_step is None else self.at_step


@dataclass(frozen=True)
class EvaluationRecord(EpochRecord):
    """The record of an evaluation within an epoch.

    Attributes:
        step: the number of steps of the whole training before it.
    """

    step: int = 0

    @property
    def at_step(self) -> int | None:
        return self.step


def merge_records(history: Iterable[EpochRecord], evaluations: Iterable[EpochRecord]) -> list[EpochRecord]:
    """The records of epochs and of the evaluations within them, oldest first."""
    return sorted([*history, *evaluations], key=lambda record: record.age)
