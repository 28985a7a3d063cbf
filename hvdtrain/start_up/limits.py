"""The learning rates of a training, when to save, and when to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.config.convert import may_take
from hvdtrain.config.plugins import CONFIGS, Registry
from hvdtrain.config.references import as_function
from hvdtrain.errors import ConfigError
from hvdtrain.learner.reducers import scale_learning_rate
from hvdtrain.learner.steps import StepsPerUpdate, steps_per_update
from hvdtrain.runtime import log
from hvdtrain.schedule.early_stopping import early_stop_reason
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import negate_higher
from hvdtrain.schedule.rates import CONTROLS, as_rate, epoch_learning_rate, listed_rates
from hvdtrain.settings import Settings
from hvdtrain.training.limits import Rates, TrainingLimits
from hvdtrain.training.session import Epochs

RATE_FACTORS: Registry[Callable[[Settings], Callable[[int, float], float] | None]] = Registry("rate_factors")
"""Of plug-ins, functions that make a factor on the learning rate, of (steps done, epochs done); None: it stays."""

ACCUMULATION = "accum_grad_multiple_step"


def open_limits(settings: Settings, epochs: Epochs) -> TrainingLimits:
    """When to save and when to end."""
    stops_within = settings.evaluation.serves("early_stopping")
    of_config = steps_per_update(settings.accumulation)

    @lru_cache(maxsize=1)
    def rounds_of(epoch: int) -> StepsPerUpdate:
        keys = epochs.keys(epoch)
        if ACCUMULATION not in keys:
            return of_config
        return steps_per_update(replace(settings.accumulation, **{ACCUMULATION: keys[ACCUMULATION]}))

    return TrainingLimits(
        num_epochs=settings.run.num_epochs,
        ends_early=lambda progress: early_stop_reason(
            settings.ending, progress.records if stops_within else progress.history, settings.measure
        ),
        save_epochs=settings.saving.save_interval,
        save_steps=settings.saving.save_interval_steps,
        save_minutes=settings.saving.save_interval_minutes,
        evaluation_steps=settings.evaluation.eval_interval_steps,
        evaluation_minutes=settings.evaluation.eval_interval_minutes,
        may_end_within=stops_within,
        steps_per_update=lambda epoch, epoch_continuous, step: rounds_of(epoch)(epoch, epoch_continuous, step),
        finite=settings.ending.stop_on_nonfinite_train_score,
    )


def open_rates(settings: Settings, size: int, epochs: Epochs) -> Rates:
    """The learning rate of an epoch and of a step. A rate for one epoch only has the effect of an entry in `learning_rates`."""
    dynamic = as_function(settings.schedule.dynamic_learning_rate, "dynamic_learning_rate")
    rates = settings.schedule
    of_dynamic = settings.origins.get("dynamic_learning_rate")
    of_dynamic = of_dynamic if of_dynamic in CONFIGS else "dynamic_learning_rate"
    control = CONTROLS[rates.learning_rate_control](settings)
    factors = [factor for make in RATE_FACTORS.values() if (factor := make(settings)) is not None]
    changes_within = settings.evaluation.serves("learning_rate")
    without_rate = dynamic is not None and not may_take(dynamic, "learning_rate")
    if without_rate and (control is not None or rates.learning_rates is not None):
        name = "learning_rate_control" if rates.learning_rates is None else "learning_rates"
        log.warning(f"{name}: has no effect, as the rate is that of {of_dynamic}, which does not take learning_rate")

    def epoch_rate(epoch: int, progress: Progress) -> float:
        rate = epochs.keys(epoch).get("learning_rate")
        if rate is not None:
            if without_rate:
                raise ConfigError.of(
                    "conflict",
                    f"keys_of_epoch(epoch={epoch}): learning_rate: expected none, as {of_dynamic} does not take it, got {rate}",
                )
            return float(rate)
        records: list[EpochRecord] = progress.records if changes_within else progress.history
        errors = negate_higher(records, settings.scoring.higher_is_better)
        if control is not None and epoch not in listed_rates(rates) and (line := control.warning(epoch, errors)) is not None:
            log.warning(line)
        return epoch_learning_rate(rates, control, epoch, errors)

    def step_rate(step: int, epoch_continuous: float, epoch_rate: float) -> float:
        rate = epoch_rate
        if dynamic is not None:
            rate = as_rate(
                "dynamic_learning_rate",
                dynamic(
                    global_train_step=step,
                    epoch=int(epoch_continuous) + 1,
                    epoch_continuous=epoch_continuous,
                    learning_rate=epoch_rate,
                ),
            )
        for factor in factors:
            rate *= factor(step, epoch_continuous)
        return scale_learning_rate(rate, settings.reduce.learning_rate_scale, size)

    return Rates(epoch_rate, step_rate, epoch_rate if changes_within else None)
