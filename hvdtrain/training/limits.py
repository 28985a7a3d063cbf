"""Settings of an engine: the learning rates, when to save, and when to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.errors import HvdtrainError, TrainingError
from hvdtrain.learner.steps import StepsPerUpdate
from hvdtrain.schedule.history import EpochRecord


@dataclass(frozen=True)
class Rates:
    """The learning rate: `epoch_rate(epoch, progress)` before an epoch, `step_rate(step, epoch_continuous, epoch_rate)` for an
    update, `within_epoch(epoch, progress)` after an evaluation within the epoch; None: it does not change the rate.

    `step_rate` returns the optimizer's rate for the update that ends a step, scaled by the number of ranks if
    `horovod_scale_lr` is set. `step` is the number of earlier steps; `epoch_continuous` the number of epochs before the first
    step of the update, including the share of the current epoch's sequences.
    """

    epoch_rate: Callable[[int, Progress], float]
    step_rate: Callable[[int, float, float], float]
    within_epoch: Callable[[int, Progress], float] | None = None


@dataclass(frozen=True)
class TrainingLimits:
    """How often to update and to save, and when to end.

    Attributes:
        num_epochs: the last epoch.
        ends_early: why training ends, given its progress; None: it continues.
        save_epochs: save after every N epochs, and after the last one.
        save_steps: also save within an epoch, after every N steps of the whole training; None: do not.
        save_minutes: also save within an epoch, when the last checkpoint is this many minutes old; "auto": when that loses least;
            None: do not.
        evaluation_steps, evaluation_minutes: the same for evaluations within an epoch.
        may_end_within: whether an evaluation within an epoch may end the epoch, and with it the training.
        steps_per_update: returns the number of steps whose gradients an update adds up.
        finite: end with an error when a training loss is not a finite number.
        mistake: returns the error to end with after the epochs of a history, once the last one is saved and reported.
    """

    num_epochs: int
    ends_early: Callable[[Progress], str | None] = lambda _: None
    save_epochs: int = 1
    save_steps: int | None = None
    save_minutes: float | Literal["auto"] | None = None
    evaluation_steps: int | None = None
    evaluation_minutes: float | None = None
    may_end_within: bool = False
    steps_per_update: StepsPerUpdate = lambda *_: 1
    finite: bool = True
    mistake: Callable[[list[EpochRecord]], HvdtrainError | None] = lambda _: None

    def are_reached(self, progress: Progress) -> bool:
        """Whether there is nothing left to train."""
        if progress.current is not None:
            return progress.current.epoch > self.num_epochs
        return progress.epoch >= self.num_epochs or self.end_after_epoch(progress) is not None

    def end_after_epoch(self, progress: Progress) -> str | None:
        """After an epoch, the reason to end training before its last epoch; None: continue."""
        reason, num_epochs = progress.finished or ("", self.num_epochs - 1)
        return reason if num_epochs >= self.num_epochs else self.ends_early(progress)


def skipped_error(history: Sequence[EpochRecord]) -> TrainingError | None:
    """The error to end with after two epochs in a row without any update."""
    if len(history) < 2 or any(record.is_updated for record in history[-2:]):
        return None
    return TrainingError(
        f"train: expected updates, got none in epochs {history[-2].epoch} and {history[-1].epoch}: all were skipped, as "
        "gradients were not finite (too large for float16: mean losses, a smaller init_scale; or every batch has a NaN)"
    ).on_all_ranks()
