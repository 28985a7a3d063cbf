"""Newbob lets the learning rate decay when the error stagnates, in all variants of the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import copysign, inf, isfinite, isnan
from statistics import fmean

from hvdtrain.plugins.schedules.keys import NewbobKeys
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import error_key, minimized_in, wanted_of
from hvdtrain.schedule.rates import as_rate
from hvdtrain.settings import Settings


def newbob_of(settings: Settings) -> Newbob:
    """The rule that a config chooses."""
    rates = settings.schedule
    wanted = wanted_of(rates.learning_rate_control_error_measure)
    return Newbob(rates.learning_rate_control, settings.of(NewbobKeys), wanted)


class Newbob:
    """The learning rate of an epoch, from the history of the epochs before it.

    Args:
        control: the value of `learning_rate_control`.
        wanted: the scores of which the first existing one is the error; empty: the minimized loss.
    """

    def __init__(self, control: str, keys: NewbobKeys, wanted: Sequence[str] = ()) -> None:
        self._control = control
        self._keys = keys
        self._wanted = wanted

    def rate(self, first: float, epoch: int, history: Sequence[EpochRecord]) -> float:
        keys = self._keys
        last = history[-1].learning_rate
        if self._must_keep_rate(history):
            return last
        if self._control == "newbob_multi_epoch":
            return self._rate_of_several(first, epoch, history)
        is_absolute = self._control == "newbob_abs"
        change = self._absolute_change(history[-2:]) if is_absolute else self._relative_change(first, history[-2:])
        if change is None:
            return last
        threshold = keys.newbob_error_threshold if is_absolute else keys.newbob_relative_error_threshold
        return self._adjust_rate(last, decays=change > threshold, grows=change <= threshold)

    def warning(self, epoch: int, history: Sequence[EpochRecord]) -> str | None:
        """The warning that it keeps an epoch's rate, since a score is not a number; None: all are."""
        if len(history) < 2:
            return None
        control = self._control
        recent = history[-(self._keys.newbob_multi_num_epochs + 1) if control == "newbob_multi_epoch" else -2 :]
        names = self._error_names(recent)
        broken = [
            record.epoch for name, record in zip(names, recent, strict=True) if name is not None and isnan(record.scores[name])
        ]
        if not broken:
            return None
        epochs = ", ".join(map(str, broken))
        return f"{control}: {names[-1]} of epoch {epochs} is not a number: epoch {epoch} keeps the learning rate"

    def _rate_of_several(self, first: float, epoch: int, history: Sequence[EpochRecord]) -> float:
        """Change the rate every N epochs by the mean of the relative changes, for epochs that cover only a part of the data."""
        keys = self._keys
        last = history[-1].learning_rate
        interval = keys.newbob_multi_update_interval or keys.newbob_multi_num_epochs
        recent = history[-(keys.newbob_multi_num_epochs + 1) :]
        changes = [self._relative_change(first, recent[index : index + 2]) for index in range(len(recent) - 1)]
        present = [change for change in changes if change is not None]
        if (interval > 1 and epoch % interval != 1) or not present or len(present) < len(changes):
            return last
        # With changes of both +inf (the error rose from zero) and -inf (it fell to zero), the mean is NaN, and the rate is kept.
        mean = fmean(present) if all(isfinite(change) for change in present) else sum(present)
        grow_threshold = keys.newbob_relative_error_grow_threshold
        if grow_threshold is None:
            grow_threshold = keys.newbob_relative_error_threshold
        return self._adjust_rate(last, decays=mean > keys.newbob_relative_error_threshold, grows=mean < grow_threshold)

    def _absolute_change(self, pair: Sequence[EpochRecord]) -> float | None:
        """The increase of the error between two epochs; None unless both have it."""
        errors = self._errors(pair)
        return None if errors is None else errors[1] - errors[0]

    def _relative_change(self, first: float, pair: Sequence[EpochRecord]) -> float | None:
        """The increase of the error relative to its absolute value, and if configured, to the learning rate."""
        keys = self._keys
        errors = self._errors(pair)
        if errors is None:
            return None
        old, new = errors
        size = abs(old if keys.newbob_relative_error_div_by_old else new)
        change = new - old
        relative = change / size if size else copysign(inf, change) if change else 0.0  # the error may be zero
        if keys.learning_rate_control_relative_error_relative_lr and pair[1].learning_rate > 0:
            relative /= pair[1].learning_rate / first
        return relative

    def _errors(self, pair: Sequence[EpochRecord]) -> tuple[float, float] | None:
        """The errors of two epochs; None unless both use the same score."""
        names = self._error_names(pair)
        if len(names) < 2 or names[0] is None or names[0] != names[1]:
            return None
        return pair[0].scores[names[0]], pair[1].scores[names[0]]

    def _error_names(self, records: Sequence[EpochRecord]) -> list[str | None]:
        """The score that is the error of each epoch; None: it has none."""
        losses = minimized_in(records)
        return [error_key(record.scores, self._wanted, losses) for record in records]

    def _must_keep_rate(self, history: Sequence[EpochRecord]) -> bool:
        """Whether the current rate has been used for fewer than the needed number of epochs."""
        needed = self._keys.learning_rate_control_min_num_epochs_per_new_lr
        if needed <= 1:
            return False
        recent = {record.learning_rate for record in history[-needed:]}
        return len(history) < needed or len(recent) > 1

    def _adjust_rate(self, rate: float, *, decays: bool, grows: bool) -> float:
        keys = self._keys
        if decays:
            return max(_apply_change("newbob_learning_rate_decay", keys.newbob_learning_rate_decay, rate), keys.min_learning_rate)
        return _apply_change("newbob_learning_rate_growth", keys.newbob_learning_rate_growth, rate) if grows else rate


def _apply_change(key: str, change: float | Callable[[float], float], rate: float) -> float:
    return as_rate(key, change(rate)) if callable(change) else rate * change
