"""The learning rate of an epoch: from a list, or computed by `learning_rate_control` from the epochs before.

Newbob lets it decay when the error stagnates, in all variants of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import copysign, inf, isfinite, isnan, nan
from statistics import fmean
from typing import Any, Literal

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import error_key, minimized_in, wanted_of

Control = Literal["constant", "newbob", "newbob_rel", "newbob_relative", "newbob_abs", "newbob_multi_epoch"]


def _is_ramp(value: list[float]) -> bool:
    if len(value) != 3:
        return False
    lowest, highest, updates = value
    return 0 < lowest < highest and updates >= 20 and updates == int(updates)


@dataclass(frozen=True, kw_only=True)
class ScheduleKeys(Section):
    """The learning rate. An epoch uses its entry of learning_rates, or the rate that learning_rate_control computes."""

    learning_rate: float | None = key(
        None, "the learning rate of the first epoch; required unless learning_rates is set", not_negative
    )
    learning_rates: list[float] | dict[int, float] | None = key(
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
        "function {signature} that returns the rate of a step; epoch_continuous runs from 0 to num_epochs, learning_rate is the "
        "epoch's rate",
        signature="*, global_train_step, epoch, epoch_continuous, learning_rate, **_",
    )
    learning_rate_ramp: list[float] = key(
        [1e-6, 1.0, 100],
        "the lowest and the highest rate that --find-learning-rate tries, and the number of updates between them",
        Rule("three numbers: a positive rate, a higher one, and at least 20 updates", _is_ramp),
    )
    learning_rate_file: str | None = key(
        None, "file for learning rate and scores of each epoch in RETURNN's format; also read if a checkpoint has no history"
    )

    def problems(self, others: Sections = ALONE) -> list[Problem]:
        problems = []
        if self.learning_rate is None and self.learning_rates is None:
            problems += problem("missing", "learning_rate: expected learning_rate or learning_rates, got neither")
        if self.learning_rates is not None and len(self.learning_rates) == 0:
            problems += problem("missing", "learning_rates: expected at least one learning rate, got an empty list")
        if (
            self.learning_rate is None
            and isinstance(self.learning_rates, dict)
            and self.learning_rates
            and 1 not in self.learning_rates
        ):
            problems += problem("missing", "learning_rates: expected the rate of epoch 1 there or in learning_rate, got neither")
        if self.learning_rate_schedule is not None and self.dynamic_learning_rate is not None:
            problems += problem("conflict", "learning_rate_schedule: expected either it or dynamic_learning_rate, got both")
        return problems


at_least_one = Rule("a number of at least 1", lambda value: value >= 1)


@dataclass(frozen=True, kw_only=True)
class NewbobKeys(Section):
    """The options of `learning_rate_control` newbob, newbob_abs and newbob_multi_epoch."""

    learning_rate_control_error_measure: str | list[str] | None = key(
        None,
        "newbob: the score it uses as error, such as dev_loss_ce, or a list, of which it uses the first that exists; "
        "None: the loss that is minimized, of several their sum, dev_loss_total. One whose higher values are better is named in "
        "higher_is_better",
    )
    learning_rate_control_relative_error_relative_lr: bool = key(
        False, "newbob: divide the relative error by the ratio of the current to the first learning rate"
    )
    learning_rate_control_min_num_epochs_per_new_lr: int = key(0, "newbob: keep a rate for at least N epochs", not_negative)
    min_learning_rate: float = key(0.0, "newbob: the lower bound of a decayed rate", not_negative)
    newbob_learning_rate_decay: float | Callable[[float], float] = key(
        0.5,
        "newbob: factor of a decay, or a function {signature}",
        positive,
        signature="learning_rate",
    )
    newbob_learning_rate_growth: float | Callable[[float], float] = key(
        1.0,
        "newbob: factor if the rate does not decay, or a function {signature}",
        positive,
        signature="learning_rate",
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

    def problems(self, others: Sections = ALONE) -> list[Problem]:
        grow = self.newbob_relative_error_grow_threshold
        if grow is not None and grow > self.newbob_relative_error_threshold:
            return problem(
                "conflict",
                "newbob_relative_error_grow_threshold: expected at most newbob_relative_error_threshold, "
                f"{self.newbob_relative_error_threshold:g}, got {grow:g} (a rate cannot decay and grow at once)",
            )
        return []


def next_rate(control: str, keys: NewbobKeys, first: float, epoch: int, history: Sequence[EpochRecord]) -> float:
    """The learning rate of an epoch, from the history of the epochs before it.

    Args:
        control: 'newbob', 'newbob_abs' or 'newbob_multi_epoch'.
        first: the learning rate of the first epoch.
        epoch: the epoch, counted from 1; with evaluations within epochs, the number of the next evaluation.
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
    return _adjust_rate(keys, last, decays=change > threshold, grows=change <= threshold)


def _next_rate_multi_epoch(keys: NewbobKeys, first: float, epoch: int, history: Sequence[EpochRecord]) -> float:
    """Change the rate every N epochs by the mean of the relative changes, for epochs that cover only a part of the data."""
    last = history[-1].learning_rate
    interval = keys.newbob_multi_update_interval or keys.newbob_multi_num_epochs
    recent = history[-(keys.newbob_multi_num_epochs + 1) :]
    changes = [relative_change(keys, first, recent[index : index + 2]) for index in range(len(recent) - 1)]
    known = [change for change in changes if change is not None]
    if (interval > 1 and epoch % interval != 1) or not known or len(known) < len(changes):
        return last
    # With changes of both +inf (the error rose from zero) and -inf (it fell to zero), the mean is NaN, and the rate is kept.
    mean = fmean(known) if all(isfinite(change) for change in known) else sum(known)
    grow_threshold = keys.newbob_relative_error_grow_threshold
    if grow_threshold is None:
        grow_threshold = keys.newbob_relative_error_threshold
    return _adjust_rate(keys, last, decays=mean > keys.newbob_relative_error_threshold, grows=mean < grow_threshold)


def absolute_change(keys: NewbobKeys, first: float, pair: Sequence[EpochRecord]) -> float | None:
    """The increase of the error between two epochs; None unless both have it."""
    errors = _errors(keys, pair)
    return None if errors is None else errors[1] - errors[0]


def relative_change(keys: NewbobKeys, first: float, pair: Sequence[EpochRecord]) -> float | None:
    """The increase of the error relative to its absolute value, and if configured, to the learning rate."""
    errors = _errors(keys, pair)
    if errors is None:
        return None
    old, new = errors
    size = abs(old if keys.newbob_relative_error_div_by_old else new)
    change = new - old
    relative = change / size if size else copysign(inf, change) if change else 0.0  # the error may be zero
    if keys.learning_rate_control_relative_error_relative_lr and pair[1].learning_rate > 0:
        relative /= pair[1].learning_rate / first
    return relative


def _errors(keys: NewbobKeys, pair: Sequence[EpochRecord]) -> tuple[float, float] | None:
    """The errors of two epochs; None unless both use the same score."""
    wanted = wanted_of(keys.learning_rate_control_error_measure)
    losses = minimized_in(pair)
    names = [error_key(record.scores, wanted, losses) for record in pair]
    if len(names) < 2 or names[0] is None or names[0] != names[1]:
        return None
    return pair[0].scores[names[0]], pair[1].scores[names[0]]


def _must_keep_rate(needed: int, history: Sequence[EpochRecord]) -> bool:
    """Whether the current rate has been used for fewer than the needed number of epochs."""
    if needed <= 1:
        return False
    recent = {record.learning_rate for record in history[-needed:]}
    return len(history) < needed or len(recent) > 1


def _adjust_rate(keys: NewbobKeys, rate: float, *, decays: bool, grows: bool) -> float:
    if decays:
        return max(_apply_change("newbob_learning_rate_decay", keys.newbob_learning_rate_decay, rate), keys.min_learning_rate)
    return _apply_change("newbob_learning_rate_growth", keys.newbob_learning_rate_growth, rate) if grows else rate


def _apply_change(key: str, change: float | Callable[[float], float], rate: float) -> float:
    return as_rate(key, change(rate)) if callable(change) else rate * change


def as_rate(key: str, value: Any) -> float:
    """The learning rate that a function of the config has returned. Raises: ConfigError.

    >>> as_rate("dynamic_learning_rate", 1)
    1.0
    """
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = nan
    if not 0 <= rate < inf:
        raise ConfigError.of(
            "wrong-result", f"{key}: expected the function to return a number that is zero or positive, got {value!r}"
        )
    return rate


def epoch_learning_rate(keys: ScheduleKeys, newbob: NewbobKeys, epoch: int, history: Sequence[EpochRecord]) -> float:
    """The learning rate of an epoch: a pure function of the keys and the epochs before it.

    Args:
        epoch: counted from 1.
        history: the finished epochs before it, oldest first. If evaluations within epochs are among them, newbob takes each
            record for an epoch.
    """
    listed = listed_rates(keys)
    if epoch in listed:
        return listed[epoch]
    if not history:
        earlier = [number for number in listed if number < epoch]
        return listed[max(earlier)] if earlier else float(keys.learning_rate or 0.0)
    if keys.learning_rate_control == "constant":
        return history[-1].learning_rate
    number = epoch if all(record.at_step is None for record in history) else len(history) + 1
    return next_rate(keys.learning_rate_control, newbob, keys.learning_rate or history[0].learning_rate, number, history)


def nan_line(keys: ScheduleKeys, newbob: NewbobKeys, epoch: int, history: Sequence[EpochRecord]) -> str | None:
    """The warning that newbob keeps an epoch's rate, since a score is not a number; None: all are, or newbob does not decide."""
    control = keys.learning_rate_control
    if control == "constant" or epoch in listed_rates(keys) or len(history) < 2:
        return None
    recent = history[-(newbob.newbob_multi_num_epochs + 1) if control == "newbob_multi_epoch" else -2 :]
    wanted = wanted_of(newbob.learning_rate_control_error_measure)
    losses = minimized_in(recent)
    names = [error_key(record.scores, wanted, losses) for record in recent]
    broken = [record.epoch for name, record in zip(names, recent, strict=True) if name is not None and isnan(record.scores[name])]
    if not broken:
        return None
    return f"{control}: {names[-1]} of epoch {', '.join(map(str, broken))} is not a number: epoch {epoch} keeps the learning rate"


def listed_rates(keys: ScheduleKeys) -> dict[int, float]:
    """The entries of `learning_rates`, by epoch."""
    if keys.learning_rates is None:
        return {}
    if isinstance(keys.learning_rates, dict):
        return {epoch: float(rate) for epoch, rate in keys.learning_rates.items()}
    return {epoch: float(rate) for epoch, rate in enumerate(keys.learning_rates, start=1)}
