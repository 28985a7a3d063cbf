"""The learning rate of an epoch: from a list, or computed by `learning_rate_control` from the epochs before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from hvdtrain.config.keys import ALONE, Section, Sections, key, not_negative
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.newbob import NewbobKeys, next_rate

Control = Literal["constant", "newbob", "newbob_rel", "newbob_relative", "newbob_abs", "newbob_multi_epoch"]


@dataclass(frozen=True, kw_only=True)
class ScheduleKeys(Section):
    """The learning rate. An epoch uses its entry of learning_rates, or the rate that learning_rate_control computes."""

    learning_rate: float | None = key(
        None, "the learning rate of the first epoch; required unless learning_rates is set", not_negative
    )
    learning_rates: list[float] | dict[int, float] | numpy.ndarray[Any, Any] | None = key(
        None,
        "the learning rates of epochs 1, 2, ..., or a dict {epoch: rate}; other epochs keep the last rate, or use "
        "learning_rate_control",
    )
    learning_rate_control: Control = key(
        "constant",
        "how the rate of an epoch is computed from the epochs before: constant, or newbob (decay when the error stagnates), by "
        "the relative change of the error, the absolute change (newbob_abs), or the mean over epochs (newbob_multi_epoch)",
    )
    learning_rate_schedule: dict[str, Any] | str | None = key(
        None,
        "the rate of each step, as a factor on the epoch's rate: constant, linear, cosine, inverse_square_root or one_cycle, "
        "each with an optional warm-up; see docs/learning_rate.md",
    )
    dynamic_learning_rate: Callable[..., float] | str | None = key(
        None,
        "function (*, global_train_step, epoch, epoch_continuous, learning_rate, **_) that returns the rate of a step; "
        "epoch_continuous runs from 0 to num_epochs, learning_rate is the epoch's rate",
    )
    learning_rate_file: str | None = key(
        None, "file for learning rate and scores of each epoch in RETURNN's format; also read if a checkpoint has no history"
    )

    def problems(self, others: Sections = ALONE) -> list[str]:
        problems = []
        if self.learning_rate is None and self.learning_rates is None:
            problems.append("learning_rate: expected learning_rate or learning_rates, got neither")
        if self.learning_rates is not None and len(self.learning_rates) == 0:
            problems.append("learning_rates: expected at least one learning rate, got an empty list")
        if (
            self.learning_rate is None
            and isinstance(self.learning_rates, dict)
            and self.learning_rates
            and 1 not in self.learning_rates
        ):
            problems.append("learning_rates: expected the rate of epoch 1 there or in learning_rate, got neither")
        if self.learning_rate_schedule is not None and self.dynamic_learning_rate is not None:
            problems.append("learning_rate_schedule: expected either it or dynamic_learning_rate, got both")
        return problems


def epoch_learning_rate(keys: ScheduleKeys, newbob: NewbobKeys, epoch: int, history: Sequence[EpochRecord]) -> float:
    """The learning rate of an epoch: a pure function of the keys and the epochs before it.

    Args:
        epoch: counted from 1.
        history: the finished epochs before it, oldest first.
    """
    listed = listed_rates(keys)
    if epoch in listed:
        return listed[epoch]
    if not history:
        earlier = [other for other in listed if other < epoch]
        return listed[max(earlier)] if earlier else float(keys.learning_rate or 0.0)
    if keys.learning_rate_control == "constant":
        return history[-1].learning_rate
    return next_rate(keys.learning_rate_control, newbob, keys.learning_rate or history[0].learning_rate, epoch, history)


def listed_rates(keys: ScheduleKeys) -> dict[int, float]:
    """The entries of `learning_rates`, by epoch."""
    if keys.learning_rates is None:
        return {}
    if isinstance(keys.learning_rates, dict):
        return {epoch: float(rate) for epoch, rate in keys.learning_rates.items()}
    return {epoch: float(rate) for epoch, rate in enumerate(keys.learning_rates, start=1)}
