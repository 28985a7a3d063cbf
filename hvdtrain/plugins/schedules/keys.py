"""The keys of newbob, of schedules of the steps, and of the file of learning rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive
from hvdtrain.errors import Problem, problem
from hvdtrain.plugins.schedules.steps import make_schedule
from hvdtrain.schedule.rates import ScheduleKeys
from hvdtrain.training.run_keys import RunKeys

at_least_one = Rule("a number of at least 1", lambda value: value >= 1)


@dataclass(frozen=True, kw_only=True)
class NewbobKeys(Section):
    """The options of `learning_rate_control` newbob, newbob_abs and newbob_multi_epoch."""

    changes_results = True

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

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        grow = self.newbob_relative_error_grow_threshold
        if grow is not None and grow > self.newbob_relative_error_threshold:
            return problem(
                "conflict",
                "newbob_relative_error_grow_threshold: expected at most newbob_relative_error_threshold, "
                f"{self.newbob_relative_error_threshold:g}, got {grow:g} (a rate cannot decay and grow at once)",
            )
        return []


@dataclass(frozen=True, kw_only=True)
class StepRateKeys(Section):
    """The learning rate from step to step."""

    changes_results = True

    learning_rate_schedule: dict[str, Any] | str | None = key(
        None,
        "the rate of each step, as a factor on the epoch's rate: constant, linear, cosine, inverse_square_root or one_cycle, "
        "each with an optional warm-up; see docs/learning_rate.md",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        run = sections.get(RunKeys)
        rates = sections.get(ScheduleKeys)
        problems = [] if run is None else make_schedule(self.learning_rate_schedule, run.num_epochs)[1]
        if self.learning_rate_schedule is not None and rates is not None and rates.dynamic_learning_rate is not None:
            problems += problem("conflict", "learning_rate_schedule: expected either it or dynamic_learning_rate, got both")
        return problems

    def changes_with(self, num_epochs: int) -> bool:
        schedules = [make_schedule(self.learning_rate_schedule, number)[0] for number in (num_epochs, 2 * num_epochs)]
        return schedules[0] != schedules[1]


@dataclass(frozen=True, kw_only=True)
class RateFileKeys(Section):
    """The file of learning rates."""

    learning_rate_file: str | None = key(
        None, "file for learning rate and scores of each epoch in RETURNN's format; also read if a checkpoint has no history"
    )
