"""When training ends before its last epoch: it does not get better any more, or it is broken."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hvdtrain.config.keys import Section, key, not_negative, positive
from hvdtrain.schedule.history import EpochRecord, error_key


@dataclass(frozen=True, kw_only=True)
class EndingKeys(Section):
    """Ending before the last epoch."""

    early_stopping_patience: int | None = key(
        None, "end after so many epochs in a row that brought no better score; None: never", positive
    )
    early_stopping_measure: str | None = key(
        None, "the score that is to get smaller, such as dev_loss_ce; None: the one newbob looks at"
    )
    early_stopping_min_difference: float = key(0.0, "a score is better if it is smaller by more than this", not_negative)
    stop_on_nonfinite_train_score: bool = key(
        True, "end with an error when a training loss is no finite number, telling rank, step, sequences and parameters"
    )


def ends_early(keys: EndingKeys, history: list[EpochRecord], newbob_measure: str | list[str] | None = None) -> str | None:
    """Why no epoch is to follow those of a history, in words; None: training goes on.

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
