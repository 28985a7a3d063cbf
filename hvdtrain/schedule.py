"""The learning rate: of each epoch (constant, a list, newbob) and of each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import copysign, inf
from typing import Any, Literal

import numpy

from hvdtrain.config.keys import key, not_negative, positive


@dataclass(frozen=True, kw_only=True)
class ScheduleKeys:
    """The learning rate. An epoch's rate is the list's entry, or else what the control makes of the epochs before."""

    learning_rate: float | None = key(
        None, "the learning rate of the first epoch; needed unless learning_rates is given", not_negative
    )
    learning_rates: list[float] | numpy.ndarray[Any, Any] | None = key(
        None, "learning rates of the epochs from 1 on; after the list the last one stays, or the control takes over"
    )
    learning_rate_control: Literal["constant", "newbob", "newbob_rel", "newbob_relative"] = key(
        "constant",
        "how the rate of an epoch follows from the epochs before: constant, or newbob (decay when the error stagnates)",
    )
    learning_rate_control_error_measure: str | None = key(
        None, "newbob: the score it looks at, such as dev_loss_ce; None: the first of the dev scores by name"
    )
    learning_rate_control_relative_error_relative_lr: bool = key(
        False, "newbob: divide the relative error by the ratio of the current to the first learning rate"
    )
    learning_rate_control_min_num_epochs_per_new_lr: int = key(0, "newbob: keep a rate for so many epochs at least", not_negative)
    newbob_relative_error_threshold: float = key(-0.01, "newbob: decay when the relative change of the error is above this")
    newbob_relative_error_div_by_old: bool = key(False, "newbob: relative to the older error instead of the newer one")
    newbob_learning_rate_decay: float = key(0.5, "newbob: factor of a decay; also called learning_rate_decay", positive)
    newbob_learning_rate_growth: float = key(
        1.0, "newbob: factor where there is no decay; also called learning_rate_growth", positive
    )
    min_learning_rate: float = key(0.0, "a decay does not go below this", not_negative)
    dynamic_learning_rate: Callable[..., float] | str | None = key(
        None,
        "function (*, global_train_step, epoch, epoch_continuous, learning_rate, **_) that gives the rate of a step; "
        "epoch_continuous runs from 0 to num_epochs, learning_rate is the epoch's",
    )

    def problems(self) -> list[str]:
        """What is wrong between the keys."""
        if self.learning_rate is None and self.learning_rates is None:
            return ["learning_rate: expected learning_rate or learning_rates, got neither"]
        if self.learning_rates is not None and len(self.learning_rates) == 0:
            return ["learning_rates: expected at least one learning rate, got an empty list"]
        return []


@dataclass(frozen=True)
class EpochRecord:
    """What is remembered of a finished epoch: its learning rate and its scores by key, such as 'dev_loss_ce'."""

    epoch: int
    learning_rate: float
    scores: dict[str, float] = field(default_factory=dict)


def epoch_learning_rate(keys: ScheduleKeys, epoch: int, history: list[EpochRecord]) -> float:
    """The learning rate of an epoch: a pure function of the keys and the epochs before it.

    Args:
        epoch: counted from 1.
        history: the finished epochs before, oldest first.
    """
    rates = [] if keys.learning_rates is None else [float(rate) for rate in keys.learning_rates]
    if epoch <= len(rates):
        return rates[epoch - 1]
    if history:
        last = history[-1].learning_rate
    else:
        last = rates[-1] if rates else float(keys.learning_rate or 0.0)
    if keys.learning_rate_control == "constant":
        return last
    return _newbob(keys, last, history)


def _newbob(keys: ScheduleKeys, last: float, history: list[EpochRecord]) -> float:
    """Decay once the error of the last epoch is not enough better than that of the one before."""
    if len(history) < 2 or _too_early(keys, last, history):
        return last
    name = keys.learning_rate_control_error_measure or error_key(history[-1].scores)
    old, new = history[-2].scores.get(name), history[-1].scores.get(name)
    if old is None or new is None:
        return last
    relative = _relative(new - old, abs(old if keys.newbob_relative_error_div_by_old else new))
    if keys.learning_rate_control_relative_error_relative_lr:
        relative /= last / (keys.learning_rate or history[0].learning_rate)
    if relative > keys.newbob_relative_error_threshold:
        return max(last * keys.newbob_learning_rate_decay, keys.min_learning_rate)
    return last * keys.newbob_learning_rate_growth


def _relative(change: float, error: float) -> float:
    """The change relative to an error, which may have come down to zero."""
    if error == 0.0:
        return copysign(inf, change) if change else 0.0
    return change / error


def _too_early(keys: ScheduleKeys, last: float, history: list[EpochRecord]) -> bool:
    """Whether the current rate has to be kept for some more epochs."""
    needed = keys.learning_rate_control_min_num_epochs_per_new_lr
    if needed <= 1:
        return False
    recent = history[-needed:]
    return len(recent) < needed or any(record.learning_rate != last for record in recent)


def error_key(scores: dict[str, float]) -> str:
    """The score newbob looks at where none is named: the first by name of the dev losses, else of the train losses."""
    for start in ("dev_loss_", "dev_", "train_loss_"):
        names = sorted(name for name in scores if name.startswith(start))
        if names:
            return names[0]
    return min(scores, default="")
