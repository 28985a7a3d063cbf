"""The factor on the learning rate of a config's `learning_rate_schedule`."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.plugins.schedules.keys import StepRateKeys
from hvdtrain.plugins.schedules.steps import make_schedule
from hvdtrain.settings import Settings


def factor_of(settings: Settings) -> Callable[[int, float], float] | None:
    """A function of the numbers of steps and of epochs done; None: the rate stays the same from step to step."""
    schedule, _ = make_schedule(settings.of(StepRateKeys).learning_rate_schedule, settings.run.num_epochs)
    return None if schedule is None else schedule.factor
