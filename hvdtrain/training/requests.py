"""The requests of this rank; `StopVote` counts those of all ranks."""

from __future__ import annotations

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.runtime.interrupt import Interrupt, Stopped
from hvdtrain.training.agreement import StopRequests
from hvdtrain.training.callbacks import Training
from hvdtrain.training.save_policy import Interval, SavePolicy
from hvdtrain.training.train_scores import TrainScores


class RankRequests:
    """This rank's current requests: to stop after a signal or for a callback, to save, or to report a loss that is not finite."""

    def __init__(
        self, interrupt: Interrupt, training: Training, save_policy: SavePolicy, evaluating: Interval, scores: TrainScores
    ) -> None:
        self._interrupt = interrupt
        self._training = training
        self._save_policy = save_policy
        self._evaluating = evaluating
        self._scores = scores

    def __call__(self) -> StopRequests:
        reason = self.stop_reason()
        by_hand = reason == "SIGINT"
        return StopRequests(
            stop=int(reason is not None and not by_hand),
            stop_by_hand=int(by_hand),
            save=int(self._save_policy.should_request()),
            report=int(self._scores.is_broken()),
            evaluate=int(self._evaluating.should_request()),
        )

    def stop_reason(self) -> str | None:
        """Why this rank wants to stop; None: it does not."""
        asked = self._training.wants_stop
        return self._interrupt.reason or (None if asked is None else f"a callback ({asked})")


def stopped_by(reason: str, current: EpochProgress, step: int, status: int) -> Stopped:
    """The error with which a training ends that was stopped, for the reason of any rank, after a step of the whole training."""
    done = f"after step {step - current.first_step}" + (", in the evaluation" if current.trained else "")
    return Stopped(
        f"stopped by {reason} in epoch {current.epoch} {done}; the same command continues from there",
        status,
        repeatable=reason != "SIGTERM",  # torchrun sends it before it restarts the ranks
    )
