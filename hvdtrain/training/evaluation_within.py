"""An evaluation between two steps of an epoch: it has no effect on the next steps but what its scores decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.report.epoch import EvaluationReceiver, EvaluationReport
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import name_scores
from hvdtrain.schedule.divergence import has_diverged
from hvdtrain.schedule.history import EvaluationRecord
from hvdtrain.training.callbacks import Training
from hvdtrain.training.epoch import EpochClock, TrainingEpoch
from hvdtrain.training.limits import Rates, TrainingLimits
from hvdtrain.training.saving import await_checkpoint
from hvdtrain.training.session import Session
from hvdtrain.training.step_log import StepLog


class EvaluationWithin:
    """Keeps an evaluation apart from the steps around it, and reports it.

    Args:
        training: what the callbacks see.
        receivers: called with the report of every evaluation.
    """

    def __init__(
        self,
        session: Session,
        training: Training,
        step_log: StepLog,
        clock: EpochClock,
        receivers: Sequence[EvaluationReceiver],
    ) -> None:
        self._session = session
        self._training = training
        self._step_log = step_log
        self._clock = clock
        self._receivers = receivers
        self._seconds = 0.0  # of the last evaluation

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside the `with` block, the log and the callbacks are about the evaluation. Its seconds do not count as those of the
        epoch, unless it is interrupted."""
        scores = self._training.scores
        with self._step_log.set_aside():
            yield
        self._training.scores = scores
        self._seconds = self._clock.skip()
        self._session.watchdog.beat(f"epoch {self._session.progress.epoch + 1}, after the evaluation within it", "between")

    def report(
        self, epoch: TrainingEpoch, scores: dict[str, float], losses: dict[str, float], datasets: Sequence[str]
    ) -> Checkpoint | None:
        """Collective. Record the evaluation in the training's progress, and report it. Returns its model if that was saved.

        Args:
            losses: the losses that are minimized, each with its scale.
            datasets: the names of the evaluated datasets.
        """
        progress = self._session.progress
        epoch.current.is_evaluation_due = False
        diverged = has_diverged(progress.history, scores, losses, name_scores("train", epoch.current.initial))
        record = EvaluationRecord(epoch.current.epoch, epoch.learning_rate, scores, losses, progress.step, is_diverged=diverged)
        progress.evaluations.append(record)
        await_checkpoint(self._session)
        self._session.watchdog.beat(f"step {progress.step}, saving", "saving")
        saved = self._session.saver.save_evaluated(progress)
        report = EvaluationReport(
            epoch=record.epoch,
            step=record.step - epoch.current.first_step,
            global_step=record.step,
            progress=epoch.share,
            learning_rate=record.learning_rate,
            scores=record.scores,
            elapsed=epoch.current.elapsed,
            seconds=self._seconds,
            losses=record.losses,
        )
        log.result(report.line(datasets))
        for receive in self._receivers:
            receive(report)
        return saved


def follow_scores(rates: Rates, limits: TrainingLimits, epoch: TrainingEpoch, progress: Progress) -> None:
    """After an evaluation: change the learning rate of the epoch, or end it, as the scores say."""
    current = epoch.current
    if rates.within_epoch is not None:
        rate = rates.within_epoch(current.epoch, progress)
        if rate != epoch.learning_rate:
            log.detail(f"epoch {current.epoch}: the learning rate is {rate:.6g} from here on, by the evaluation within it")
            current.learning_rate = rate
    if limits.may_end_within and (reason := limits.ends_early(progress)) is not None:
        log.info(f"epoch {current.epoch} ends after step {progress.step - current.first_step}: {reason}")
        current.ended_by = reason
