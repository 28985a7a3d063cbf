"""Newbob: the learning rate decays when the error stagnates. All variants of RETURNN's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import copysign, inf, isfinite
from statistics import fmean

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive
from hvdtrain.schedule.history import EpochRecord, error_key, wanted_of

at_least_one = Rule("a number of at least 1", lambda value: value >= 1)


@dataclass(frozen=True, kw_only=True)
class NewbobKeys(Section):
    """The options of `learning_rate_control` newbob, newbob_abs and newbob_multi_epoch."""

    learning_rate_control_error_measure: str | list[str] | None = key(
        None,
        "newbob: the score it uses as error, such as dev_loss_ce, or a list, of which it uses the first that exists; "
        "None: the first dev score by name. One whose higher values are better is named in higher_is_better",
    )
    learning_rate_control_relative_error_relative_lr: bool = key(
        False, "newbob: divide the relative error by the ratio of the current to the first learning rate"
    )
    learning_rate_control_min_num_epochs_per_new_lr: int = key(0, "newbob: keep a rate for at least N epochs", not_negative)
    min_learning_rate: float = key(0.0, "newbob: the lower bound of a decayed rate", not_negative)
    newbob_learning_rate_decay: float | Callable[[float], float] = key(
        0.5, "newbob: factor of a decay, or a function of the rate; alias: learning_rate_decay", positive
    )
    newbob_learning_rate_growth: float | Callable[[float], float] = key(
        1.0, "newbob: factor if the rate does not decay, or a function of the rate; alias: learning_rate_growth", positive
    )
    newbob_relative_error_threshold: float = key(
        -0.01, "newbob, newbob_multi_epoch: decay when the relative change of the error is above this"
    )
    newbob_relative_error_div_by_old: bool = key(False, "newbob: divide the change by the old error instead of the new one")
    newbob_error_threshold: float = key(-0.01, "newbob_abs: decay when the change of the error is above this")
    newbob_multi_num_epochs: int = key(5, "newbob_multi_epoch: use the mean change over N epochs", at_least_one)
    newbob_multi_update_interval: int | None = key(
        None, "newbob_multi_epoch: change the rate only every N epochs; None: newbob_multi_num_epochs", at_least_one
    )
    newbob_relative_error_grow_threshold: float | None = key(
        None, "newbob_multi_epoch: grow when the mean change is below this; None: newbob_relative_error_threshold"
    )

    def problems(self, others: Sections = ALONE) -> list[str]:
        grow = self.newbob_relative_error_grow_threshold
        if grow is not None and grow > self.newbob_relative_error_threshold:
            return [
                "newbob_relative_error_grow_threshold: expected at most newbob_relative_error_threshold, "
                f"{self.newbob_relative_error_threshold:g}, got {grow:g} (a rate cannot decay and grow at once)"
            ]
        return []


def next_rate(control: str, keys: NewbobKeys, first: float, epoch: int, history: Sequence[EpochRecord]) -> float:
    """The learning rate of an epoch, from the history of the epochs before it.

    Args:
        control: 'newbob', 'newbob_abs' or 'newbob_multi_epoch'.
        first: the learning rate of the first epoch.
        epoch: the epoch, counted from 1.
        history: at least one epoch, oldest first.
    """
    last = history[-1].learning_rate
    if _must_keep_rate(keys.learning_rate_control_min_num_epochs_per_new_lr, history):
        return last
    if control == "newbob_multi_epoch":
        return _next_rate_multi_epoch(keys, first, epoch, history)
    change = (absolute_change if control == "newbob_abs" else relative_change)(keys, first, history[-2:])
    if change is None:
        return last
    threshold = keys.newbob_error_threshold if control == "newbob_abs" else keys.newbob_relative_error_threshold
    return _changed(keys, last, decays=change > threshold, grows=change <= threshold)


def _next_rate_multi_epoch(keys: NewbobKeys, first: float, epoch: int, history: Sequence[EpochRecord]) -> float:
    """Change the rate every N epochs by the mean of the relative changes, for epochs that cover only a part of the data."""
    last = history[-1].learning_rate
    interval = keys.newbob_multi_update_interval or keys.newbob_multi_num_epochs
    recent = history[-(keys.newbob_multi_num_epochs + 1) :]
    changes = [relative_change(keys, first, recent[index : index + 2]) for index in range(len(recent) - 1)]
    known = [change for change in changes if change is not None]
    if (interval > 1 and epoch % interval != 1) or not known or len(known) < len(changes):
        return last
    # If changes of +inf (the error rose from zero) and -inf (it fell to zero) meet, the mean is NaN and the rate is kept.
    mean = fmean(known) if all(isfinite(change) for change in known) else sum(known)
    grow_threshold = keys.newbob_relative_error_grow_threshold
    if grow_threshold is None:
        grow_threshold = keys.newbob_relative_error_threshold
    return _changed(keys, last, decays=mean > keys.newbob_relative_error_threshold, grows=mean < grow_threshold)


def absolute_change(keys: NewbobKeys, first: float, pair: Sequence[EpochRecord]) -> float | None:
    """The increase of the error between two epochs; None if they do not both have it."""
    errors = _errors(keys, pair)
    return None if errors is None else errors[1] - errors[0]


def relative_change(keys: NewbobKeys, first: float, pair: Sequence[EpochRecord]) -> float | None:
    """The increase relative to the absolute error, and if configured, to the learning rate."""
    errors = _errors(keys, pair)
    if errors is None:
        return None
    old, new = errors
    size = abs(old if keys.newbob_relative_error_div_by_old else new)
    change = new - old
    # The error may be zero.
    relative = change / size if size else copysign(inf, change) if change else 0.0
    if keys.learning_rate_control_relative_error_relative_lr and pair[1].learning_rate > 0:
        relative /= pair[1].learning_rate / first
    return relative


def _errors(keys: NewbobKeys, pair: Sequence[EpochRecord]) -> tuple[float, float] | None:
    """The errors of two epochs; None unless the same score is the error of both."""
    wanted = wanted_of(keys.learning_rate_control_error_measure)
    names = [error_key(record.scores, wanted) for record in pair]
    if len(names) < 2 or names[0] is None or names[0] != names[1]:
        return None
    return pair[0].scores[names[0]], pair[1].scores[names[0]]


def _must_keep_rate(needed: int, history: Sequence[EpochRecord]) -> bool:
    """Whether the current rate has not been used for the needed number of epochs yet."""
    if needed <= 1:
        return False
    recent = {record.learning_rate for record in history[-needed:]}
    return len(history) < needed or len(recent) > 1


def _changed(keys: NewbobKeys, rate: float, *, decays: bool, grows: bool) -> float:
    if decays:
        return max(_applied(keys.newbob_learning_rate_decay, rate), keys.min_learning_rate)
    return _applied(keys.newbob_learning_rate_growth, rate) if grows else rate


def _applied(change: float | Callable[[float], float], rate: float) -> float:
    return float(change(rate)) if callable(change) else rate * change
