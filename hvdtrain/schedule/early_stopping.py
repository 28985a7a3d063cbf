"""Whether training ends before its last epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.config.keys import Section, key, not_negative, positive
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingKeys(Section):
    """When training ends before its last epoch."""

    early_stopping_patience: int | None = key(
        None, "end training after N consecutive epochs without a better score; None: never", positive
    )
    early_stopping_measure: str | list[str] | None = key(
        None,
        "the score by which epochs are compared, such as dev_loss_ce, also for best.json; of a list, the first that exists; "
        "None: that of newbob, if it has one, else the loss that is minimized (of several, their sum: dev_loss_total). "
        "Lower is better, but see higher_is_better",
    )
    early_stopping_min_difference: float = key(0.0, "an epoch is better if its score is better by more than this", not_negative)
    stop_on_nonfinite_train_score: bool = key(
        True, "end with an error when a training loss is not finite, reporting rank, step, sequences and parameters"
    )

    @property
    def measures(self) -> Mapping[str, str | list[str] | None]:
        return {"early_stopping_measure": self.early_stopping_measure}


def early_stop_reason(keys: EarlyStoppingKeys, history: Sequence[EpochRecord], measure: Measure) -> str | None:
    """The reason to end training after the epochs of a history, for the log; None: training continues.

    Args:
        history: the finished epochs, and evaluations within epochs if these count; oldest first.
        measure: compares epochs.
    """
    if keys.early_stopping_patience is None or not history:
        return None
    name = measure.name(history)
    best = measure.best(history, keys.early_stopping_min_difference)
    patience = keys.early_stopping_patience
    if name is None or _num_since(history, history[0] if best is None else best) < patience:
        return None
    if best is None:
        return f"{name} was not a number in any of {len(history)} epochs, early_stopping_patience is {patience}"
    at = f"epoch {best.epoch}" if best.at_step is None else f"step {best.at_step} in epoch {best.epoch}"
    return f"{name} was best after {at} ({best.scores[name]:.4g}), early_stopping_patience is {patience}"


def _num_since(history: Sequence[EpochRecord], since: EpochRecord) -> int:
    """How many epochs, or evaluations if some are within epochs, there were after a record."""
    if all(record.at_step is None for record in history):
        return history[-1].epoch - since.epoch
    return len(history) - 1 - next(number for number, record in enumerate(history) if record is since)
