"""The learning rate of an epoch: from a list, or computed by `learning_rate_control` from the epochs before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, Protocol

from hvdtrain.config.keys import ALONE, Section, Sections, key, not_negative, one_of
from hvdtrain.config.plugins import Registry
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.schedule.history import EpochRecord


class RateControl(Protocol):
    """Computes the learning rate of an epoch from the epochs before it."""

    def rate(self, first: float, epoch: int, history: Sequence[EpochRecord]) -> float:
        """The rate of an epoch.

        Args:
            first: the learning rate of the first epoch.
            epoch: counted from 1; with evaluations within epochs, the number of the next evaluation.
            history: at least one epoch, oldest first. The scores are errors: of all, lower values are better.
        """
        ...

    def warning(self, epoch: int, history: Sequence[EpochRecord]) -> str | None:
        """What is wrong with the scores that the rate of an epoch follows from; None: nothing."""
        ...


CONSTANT = "constant"

CONTROLS: Registry[Callable[[Any], RateControl | None]] = Registry("rate_controls", {CONSTANT: lambda settings: None})
"""By value of the key `learning_rate_control`, a function of the settings."""


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
    learning_rate_control: str = key(
        CONSTANT,
        "how the rate of an epoch is computed from the epochs before: constant, or newbob (decay when the error stagnates), by "
        "the relative change of the error, the absolute change (newbob_abs), or the mean over epochs (newbob_multi_epoch)",
        one_of(CONTROLS),
    )
    learning_rate_control_error_measure: str | list[str] | None = key(
        None,
        "newbob: the score it uses as error, such as dev_loss_ce, or a list, of which it uses the first that exists; "
        "None: the loss that is minimized, of several their sum, dev_loss_total. One whose higher values are better is named in "
        "higher_is_better",
    )
    dynamic_learning_rate: Callable[..., float] | str | None = key(
        None,
        "function {signature} that returns the rate of a step; epoch_continuous runs from 0 to num_epochs, learning_rate is the "
        "epoch's rate",
        signature="*, global_train_step, epoch, epoch_continuous, learning_rate, **_",
    )

    @property
    def measures(self) -> Mapping[str, str | list[str] | None]:
        return {"learning_rate_control_error_measure": self.learning_rate_control_error_measure}

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
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
        return problems


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


def epoch_learning_rate(keys: ScheduleKeys, control: RateControl | None, epoch: int, history: Sequence[EpochRecord]) -> float:
    """The learning rate of an epoch: a pure function of the keys and the epochs before it.

    Args:
        control: None: without an entry of `learning_rates`, the rate stays the same.
        epoch: counted from 1.
        history: the finished epochs before it, oldest first. If evaluations within epochs are among them, a control takes each
            record for an epoch.
    """
    listed = listed_rates(keys)
    if epoch in listed:
        return listed[epoch]
    if not history:
        earlier = [number for number in listed if number < epoch]
        return listed[max(earlier)] if earlier else float(keys.learning_rate or 0.0)
    if control is None:
        return history[-1].learning_rate
    number = epoch if all(record.at_step is None for record in history) else len(history) + 1
    return control.rate(keys.learning_rate or history[0].learning_rate, number, history)


def listed_rates(keys: ScheduleKeys) -> dict[int, float]:
    """The entries of `learning_rates`, by epoch."""
    if keys.learning_rates is None:
        return {}
    if isinstance(keys.learning_rates, dict):
        return {epoch: float(rate) for epoch, rate in keys.learning_rates.items()}
    return {epoch: float(rate) for epoch, rate in enumerate(keys.learning_rates, start=1)}
