"""Newbob: the learning rate decays when the error stagnates. The rules are RETURNN's, in all their variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import copysign, inf, isfinite
from statistics import fmean
from typing import Any

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive
from hvdtrain.schedule.history import EpochRecord, error_key

at_least_one = Rule("a number from 1 on", lambda value: value >= 1)


@dataclass(frozen=True, kw_only=True)
class NewbobKeys(Section):
    """What `learning_rate_control` newbob, newbob_abs and newbob_multi_epoch look at, and what they do."""

    learning_rate_control_error_measure: str | list[str] | None = key(
        None,
        "newbob: the score it looks at, such as dev_loss_ce, or several, of which the first that is there counts; "
        "None: the first of the dev scores by name",
    )
    learning_rate_control_relative_error_relative_lr: bool = key(
        False, "newbob: divide the relative error by the ratio of the current to the first learning rate"
    )
    learning_rate_control_min_num_epochs_per_new_lr: int = key(0, "newbob: keep a rate for so many epochs at least", not_negative)
    min_learning_rate: float = key(0.0, "newbob: a decay does not go below this", not_negative)
    newbob_learning_rate_decay: float | Callable[[float], float] = key(
        0.5, "newbob: factor of a decay, or a function of the rate; also called learning_rate_decay", positive
    )
    newbob_learning_rate_growth: float | Callable[[float], float] = key(
        1.0, "newbob: factor where there is no decay, or a function of the rate; also called learning_rate_growth", positive
    )
    newbob_relative_error_threshold: float = key(
        -0.01, "newbob, newbob_multi_epoch: decay when the relative change of the error is above this"
    )
    newbob_relative_error_div_by_old: bool = key(False, "newbob: relative to the older error instead of the newer one")
    newbob_error_threshold: float = key(-0.01, "newbob_abs: decay when the change of the error is above this")
    newbob_multi_num_epochs: int = key(5, "newbob_multi_epoch: the mean change over so many epochs counts", at_least_one)
    newbob_multi_update_interval: int | None = key(
        None, "newbob_multi_epoch: change the rate every so many epochs only; None: newbob_multi_num_epochs", at_least_one
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
    """The rate of an epoch, from those before it.

    Args:
        control: 'newbob', 'newbob_abs' or 'newbob_multi_epoch'.
        first: the rate of the first epoch, where the key learning_rate gives it.
        history: at least one epoch, oldest first.
    """
    last = history[-1].learning_rate
    if _too_early(keys.learning_rate_control_min_num_epochs_per_new_lr, history):
        return last
    if control == "newbob_multi_epoch":
        return _after_several(keys, first, epoch, history)
    change = (absolute_change if control == "newbob_abs" else relative_change)(keys, first, history[-2:])
    if change is None:
        return last
    threshold = keys.newbob_error_threshold if control == "newbob_abs" else keys.newbob_relative_error_threshold
    return _changed(keys, last, decays=change > threshold, grows=change <= threshold)


def _after_several(keys: NewbobKeys, first: float, epoch: int, history: Sequence[EpochRecord]) -> float:
    """Every so many epochs, by the mean of the relative changes since: for epochs that are parts of the data."""
    last = history[-1].learning_rate
    interval = keys.newbob_multi_update_interval or keys.newbob_multi_num_epochs
    recent = history[-(keys.newbob_multi_num_epochs + 1) :]
    changes = [relative_change(keys, first, recent[index : index + 2]) for index in range(len(recent) - 1)]
    known = [change for change in changes if change is not None]
    if (interval > 1 and epoch % interval != 1) or not known or len(known) < len(changes):
        return last
    # The mean of an error that came down to zero and one that rose from it has no value; then nothing changes.
    mean = fmean(known) if all(isfinite(change) for change in known) else sum(known)
    grow_threshold = keys.newbob_relative_error_grow_threshold
    if grow_threshold is None:
        grow_threshold = keys.newbob_relative_error_threshold
    return _changed(keys, last, decays=mean > keys.newbob_relative_error_threshold, grows=mean < grow_threshold)


def absolute_change(keys: NewbobKeys, first: float, pair: Sequence[EpochRecord]) -> float | None:
    """How much greater the error has become between two epochs; None where it is not known of both."""
    errors = _errors(keys, pair)
    return None if errors is None else errors[1] - errors[0]


def relative_change(keys: NewbobKeys, first: float, pair: Sequence[EpochRecord]) -> float | None:
    """The same relative to the size of the error, and perhaps of the learning rate."""
    errors = _errors(keys, pair)
    if errors is None:
        return None
    old, new = errors
    size = abs(old if keys.newbob_relative_error_div_by_old else new)
    change = new - old
    # The error may have come down to zero.
    relative = change / size if size else copysign(inf, change) if change else 0.0
    if keys.learning_rate_control_relative_error_relative_lr and pair[1].learning_rate > 0:
        relative /= pair[1].learning_rate / first
    return relative


def _errors(keys: NewbobKeys, pair: Sequence[EpochRecord]) -> tuple[float, float] | None:
    """The error after each of two epochs, where it is the same score that is looked at."""
    measure: Any = keys.learning_rate_control_error_measure or []
    wanted = [measure] if isinstance(measure, str) else measure
    names = [error_key(record.scores, wanted) for record in pair]
    if len(names) < 2 or names[0] is None or names[0] != names[1]:
        return None
    return pair[0].scores[names[0]], pair[1].scores[names[0]]


def _too_early(needed: int, history: Sequence[EpochRecord]) -> bool:
    """Whether the current rate has to be kept for some more epochs."""
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
