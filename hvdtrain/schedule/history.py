"""The history of a training: learning rate and scores of the finished epochs, and which score is the one to minimize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
        """Add the rate of one more update."""
        if not self.updates:
            self.first = self.lowest = self.highest = rate
        self.updates += 1
        self.last = rate
        self.lowest, self.highest = min(self.lowest, rate), max(self.highest, rate)
        self.total += rate

    def summary(self) -> dict[str, float] | None:
        """The first, lowest and highest rate and their mean; None if all are the same."""
        if self.lowest == self.highest:
            return None
        return {"first": self.first, "lowest": self.lowest, "highest": self.highest, "mean": self.total / self.updates}


@dataclass(frozen=True)
class EpochRecord:
    """The learning rate of a finished epoch, before a schedule scales it in each step, and its scores by key: 'dev_loss_ce'."""

    epoch: int
    learning_rate: float
    scores: dict[str, float] = field(default_factory=dict)


def error_key(scores: Mapping[str, float], wanted: Sequence[str] = ()) -> str | None:
    """The score that controls the learning rate, chosen as in RETURNN; None if there are no scores.

    The first of these that exists: the wanted ones (each also with the suffix `_output`, the name of a network's main output),
    dev_score, the first dev score in alphabetical order, train_score, the first score in alphabetical order.

    >>> error_key({"train_loss_ce": 1.0, "dev_loss_wer": 0.2, "dev_loss_ce": 1.1})
    'dev_loss_ce'
    >>> error_key({"dev_loss_wer": 0.2, "dev_loss_ce": 1.1}, ["dev_loss_wer"])
    'dev_loss_wer'
    """
    names = sorted(name for name in scores if not name.startswith(META))
    candidates = [name for one in wanted for name in (one, f"{one}_output")] + ["dev_score", "dev_score_output"]
    candidates += [name for name in names if name == "dev_score_output/output" or name.startswith("dev_score_output/output_")]
    candidates += [name for name in names if name.startswith("dev_score_output/")]
    candidates += [name for name in names if name.startswith("dev_")]
    candidates += ["train_score", "train_score_output", *names]
    return next((name for name in candidates if name in names), None)
