"""When to stop, to save and to evaluate: the owner of signals, intervals, callbacks' requests, and the vote of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.errors import BY_CTRL_C, TO_BE_CONTINUED
from hvdtrain.learner.drift import checksum
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.training.callbacks import Training
from hvdtrain.training.limits import TrainingLimits
from hvdtrain.training.phase import Phase
from hvdtrain.training.session import Session
from hvdtrain.training.train_scores import TrainScores
from hvdtrain.training.vote import NONE, Requests, Vote


class Interval:
    """When something (a save, an evaluation) is due within an epoch: after every N steps, or N minutes after it was last done. It
    stays due until it is done.

    The steps are the same on all ranks, which so decide alike (`is_due`). Their clocks are not: one rank measures the minutes,
    requests it (`is_wanted`), and all ranks take up the request after the same update (`count`).

    Args:
        steps: after every N steps of the whole training; None: not after certain steps.
        minutes: the number of minutes after which it is due again, or a function that returns it; None: not by the clock.
        step: the number of steps of the whole training so far.
        has_clock: whether this rank measures the minutes.
    """

    def __init__(
        self,
        steps: int | None,
        minutes: float | Callable[[], float] | None,
        step: int,
        has_clock: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._minutes = minutes
        self._has_clock = has_clock
        self._clock = clock
        self._done_at = clock()
        self._done_step = step
        self._is_requested = False  # by any rank
        self._is_old_request = False  # whether the exchange under way began before it was done

    def is_due(self, step: int) -> bool:
        """Whether it was requested, or a multiple of N steps has been passed, since it was last done."""
        every = self._steps
        return self._is_requested or (every is not None and step // every > self._done_step // every)

    def is_wanted(self) -> bool:
        """Whether this rank requests it, as it was last done too long ago."""
        if self._minutes is None or not self._has_clock:
            return False
        minutes = self._minutes() if callable(self._minutes) else self._minutes
        return self.age >= 60 * minutes

    def count(self, requests: int) -> None:
        """Take up the number of ranks that requested it in an exchange."""
        self._is_requested = self._is_requested or (bool(requests) and not self._is_old_request)
        self._is_old_request = False

    @property
    def age(self) -> float:
        """Seconds since it was last done."""
        return self._clock() - self._done_at

    def done(self, step: int) -> None:
        """It was done after a step of the whole training."""
        self._done_at = self._clock()
        self._done_step = step
        self._is_requested = False
        self._is_old_request = True


class Decision(NamedTuple):
    """What all ranks do next.

    Attributes:
        stop: the exit status with which the training stops; None: it goes on.
        save: write a checkpoint.
        evaluate: evaluate within the epoch.
        not_finite: end with an error about a loss that is not finite.
        compare: compare the ranks' weights, whose checksums differ.
    """

    stop: int | None
    save: bool
    evaluate: bool
    not_finite: bool
    compare: bool


GO_ON = Decision(stop=None, save=False, evaluate=False, not_finite=False, compare=False)


class StopNow(Exception):
    """All ranks end what they do and stop the training.

    Attributes:
        status: the exit status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Control:
    """Decides for all ranks alike whether they stop, save or evaluate.

    Args:
        training: what the callbacks of this rank ask for.
        scores: knows of losses that are not finite.
        evaluates: whether there is anything to evaluate.
        interval: seconds between two exchanges.

    Attributes:
        save, evaluation: when a checkpoint and an evaluation within the epoch are due.
    """

    def __init__(
        self,
        session: Session,
        limits: TrainingLimits,
        training: Training,
        scores: TrainScores,
        evaluates: bool,
        interval: float,
    ) -> None:
        comm = session.comm
        step = session.progress.step
        self._comm = comm
        self._evaluates = evaluates
        self._interrupt = session.interrupt
        self._training = training
        self._scores = scores
        self._save_epochs = limits.save_epochs
        self._keeps_ranks_alike = comm.size > 1 and session.reducer.gradients.keeps_ranks_alike
        self._checksum = partial(checksum, session.learner.state)
        self._vote = Vote(comm, session.learner.numbers, interval)
        save_minutes = session.goodput.save_minutes if limits.save_minutes == "auto" else limits.save_minutes
        self.save = Interval(limits.save_steps, save_minutes, step, has_clock=comm.rank == 0)
        steps, minutes = (limits.evaluation_steps, limits.evaluation_minutes) if evaluates else (None, None)
        self.evaluation = Interval(steps, minutes, step, has_clock=comm.rank == 0)

    def poll(self, phase: Phase) -> Decision:
        """Collective. Called after every update and every step of an evaluation."""
        checksum = self._checksum if self._keeps_ranks_alike and phase.dataset is None else None
        exchanged = self._vote.step(self._requests, (phase.dataset, phase.is_trained), checksum)
        if exchanged is not None:
            self.save.count(exchanged.save)
            self.evaluation.count(exchanged.evaluate)
        saves = self.save.is_due(phase.step)
        evaluates = (self._evaluates and self._training.wants_evaluation) or self.evaluation.is_due(phase.step)
        if exchanged is None and not saves and not evaluates:
            return GO_ON
        counted = exchanged or NONE
        status = BY_CTRL_C if counted.stop_by_hand else TO_BE_CONTINUED if counted.stop else None
        return Decision(status, saves, evaluates, bool(counted.not_finite), bool(counted.compare))

    def evaluated(self, step: int) -> None:
        """All datasets were evaluated after a step of the whole training."""
        self.evaluation.done(step)
        self._training.wants_evaluation = False

    def is_save_due_after_epoch(self, epoch: int, is_last: bool) -> bool:
        """Whether to save the model of a finished epoch."""
        return epoch % self._save_epochs == 0 or is_last

    def is_save_worthwhile(self, seconds: float) -> bool:
        """Collective. Whether at least so many seconds of training would be lost without a checkpoint."""
        return bool(self._comm.gather(self.save.age, name="age")[0] >= seconds)

    def stop_reason(self) -> str:
        """Collective. Why the ranks stop."""
        reasons = self._comm.gather(self._stop_reason(), name="reasons")
        return next(reason for reason in reasons if reason is not None)

    def finish(self) -> None:
        """Collective. Wait for the last exchange."""
        self._vote.finish()

    def _requests(self) -> Requests:
        """This rank's requests, for an exchange that starts."""
        reason = self._stop_reason()
        by_hand = reason == "SIGINT"
        return Requests(
            stop=int(reason is not None and not by_hand),
            stop_by_hand=int(by_hand),
            save=int(self.save.is_wanted()),
            not_finite=int(self._scores.take_not_finite()),
            evaluate=int(self.evaluation.is_wanted()),
        )

    def _stop_reason(self) -> str | None:
        """Why this rank wants to stop; None: it does not."""
        callback = self._training.wants_stop
        return self._interrupt.reason or (None if callback is None else f"a callback ({callback})")


def stopped_by(reason: str, progress: Progress, status: int) -> Stopped:
    """The error with which a training ends that was stopped, for the reason of any rank."""
    current = progress.current
    where = f"after epoch {progress.epoch}"
    if current is not None:
        where = f"in epoch {current.epoch} after step {progress.step - current.first_step}"
        where += ", in the evaluation" if current.trained else ""
    return Stopped(
        f"stopped by {reason} {where}; the same command continues from there",
        status,
        repeatable=reason != "SIGTERM",  # torchrun sends it before it restarts the ranks
    )
