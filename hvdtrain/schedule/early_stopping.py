"""Early stopping: training ends before its last epoch if the score does not improve, or if a loss is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hvdtrain.config.keys import Section, key, not_negative, positive
from hvdtrain.schedule.history import EpochRecord, error_key


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingKeys(Section):
    """When training ends before its last epoch."""

    early_stopping_patience: int | None = key(
        None, "end training after N consecutive epochs without a better score; None: never", positive
    )
    early_stopping_measure: str | None = key(None, "the score to minimize, such as dev_loss_ce; None: the score that newbob uses")
    early_stopping_min_difference: float = key(0.0, "a score is better if it is lower by more than this", not_negative)
    stop_on_nonfinite_train_score: bool = key(
        True, "end with an error when a training loss is not finite, reporting rank, step, sequences and parameters"
    )


def ends_early(keys: EarlyStoppingKeys, history: list[EpochRecord], newbob_measure: str | list[str] | None = None) -> str | None:
    """The reason to end training after the epochs of a history, for the log; None: training continues.

    Args:
        history: the finished epochs, oldest first.
        newbob_measure: the config's learning_rate_control_error_measure.
    """
    if keys.early_stopping_patience is None or not history:
        return None
    wanted = keys.early_stopping_measure or newbob_measure or []
    name = error_key(history[-1].scores, [wanted] if isinstance(wanted, str) else wanted)
    if name is None:
        return None
    best, best_epoch = inf, 0
    for record in history:
        score = record.scores.get(name, inf)
        if score < best - keys.early_stopping_min_difference or not best_epoch:
            best, best_epoch = score, record.epoch
    if history[-1].epoch - best_epoch < keys.early_stopping_patience:
        return None
    return f"{name} was best after epoch {best_epoch} ({best:.4g}), early_stopping_patience is {keys.early_stopping_patience}"
