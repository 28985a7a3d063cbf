"""An epoch of training: its plan, its learning rates, and its times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.learner.meter import Meter
from hvdtrain.learner.reducer import Reducer, Traffic
from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.steps import peak_memory
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import name_scores
from hvdtrain.runtime.timer import Timer
from hvdtrain.schedule.divergence import divergence_lines, has_diverged
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.training.agreement import completed_share, plan_together
from hvdtrain.training.limits import Rates
from hvdtrain.training.session import Session


@dataclass(frozen=True)
class TrainingEpoch:
    """An epoch that begins or continues.

    Attributes:
        plan: all of its batches.
        current: its progress; kept up to date.
        completed: returns the share of its sequences before a position.
        planned_rate: the epoch's learning rate when it began, before a per-step rule is applied.
        first_rate: the effective learning rate with which it begins or resumes.
        seconds_before: seconds of training before it was resumed.
    """

    plan: Plan
    current: EpochProgress
    completed: Callable[[int], float]
    planned_rate: float
    first_rate: float
    seconds_before: float

    @property
    def learning_rate(self) -> float:
        """The epoch's learning rate, which an evaluation within it may have changed; before a per-step rule is applied."""
        return self.planned_rate if self.current.learning_rate is None else self.current.learning_rate

    @property
    def share(self) -> float:
        """The share of it that is done, from 0 to 1."""
        return self.completed(self.current.position)

    @property
    def continuous(self) -> float:
        """The number of epochs done, including the share of this one."""
        return self.current.epoch - 1 + self.share


def plan_epoch(session: Session, feed: Feed, rates: Rates, current: EpochProgress) -> TrainingEpoch:
    """Collective. Plan an epoch that begins or is resumed, and choose its learning rate and, where it begins, its model."""
    number = current.epoch
    step = session.progress.step
    watchdog = session.watchdog
    for hooks in session.checkpoint_hooks if not current.fingerprints else ():  # it begins
        hooks.begin_epoch(number, session.progress, session.saver, session.loader)
    planned = rates.epoch_rate(number, session.progress)
    learning_rate = planned if current.learning_rate is None else current.learning_rate
    watchdog.beat(f"epoch {number}, planning", "planning")
    plan = plan_together(session.comm, feed, number)
    watchdog.beat(f"epoch {number}, before its steps", "between")
    completed = completed_share(session.comm, feed, plan, session.learner.numbers)
    effective = rates.step_rate(step, number - 1 + completed(current.position), learning_rate)
    log.detail(f"start epoch {number} global train step {step} with effective learning rate {effective:.6g} ...")
    return TrainingEpoch(plan, current, completed, planned, effective, seconds_before=current.elapsed)


class EpochClock:
    """Measures the seconds of an epoch, and the syncs and bytes of its exchange.

    They are added to the epoch's progress at its end and before a checkpoint (`count`), so that a resumed epoch continues them.
    """

    def __init__(self, timer: Timer, meter: Meter, reducer: Reducer) -> None:
        self._timer = timer
        self._meter = meter
        self._reducer = reducer
        self._begun = self._counted_until = time.perf_counter()
        self._counted_sync = 0.0  # seconds of parameter averaging
        self._counted_traffic = Traffic()
        self._computed = self._elapsed = 0.0  # of this rank, since the epoch began or was resumed

    def begin(self) -> None:
        """Begin or resume an epoch."""
        self._timer.take()
        self._begun = self._counted_until = time.perf_counter()
        self._counted_sync = self._computed = self._elapsed = 0.0

    def elapsed(self, current: EpochProgress) -> float:
        """Seconds that the training of the epoch has taken so far."""
        return current.elapsed + time.perf_counter() - self._counted_until

    def count(self, current: EpochProgress) -> None:
        """Add the seconds, syncs and bytes since the last call to the epoch's."""
        traffic = self._reducer.traffic
        counted = self._counted_traffic
        current.syncs += traffic.syncs - counted.syncs
        current.sent += traffic.sent - counted.sent
        current.sent_between_groups += traffic.between_groups - counted.between_groups
        self._counted_traffic = traffic
        # Steps as the device saw them, collectives included, and the averaging of parameters between them. This waits for a GPU,
        # on whose last steps the host was ahead: the time that it takes belongs to the epoch's.
        synced = self._timer.seconds.get("parameter sync", 0.0)
        with self._timer.span("compute"):
            computed = self._meter.take_step_seconds() + synced - self._counted_sync
        self._counted_sync = synced
        now = time.perf_counter()
        passed, self._counted_until = now - self._counted_until, now
        current.computing += computed
        current.elapsed += passed
        self._computed += computed
        self._elapsed += passed

    @property
    def computing(self) -> float | None:
        """The share of the time that this rank spent in steps, since the epoch began or was resumed; None: there were none."""
        return self._computed / self._elapsed if self._elapsed else None

    def skip(self) -> float:
        """Leave out of the epoch's time what has passed since the last call of `count`, and return it."""
        now = time.perf_counter()
        passed, self._counted_until = now - self._counted_until, now
        return passed

    def seconds(self) -> dict[str, float]:
        """This rank's seconds since the epoch began or was resumed, by activity."""
        seconds = dict(self._timer.seconds)
        return {**seconds, "rest": time.perf_counter() - self._begun - sum(seconds.values())}


def epoch_report(
    epoch: TrainingEpoch,
    feed: Feed,
    session: Session,
    scores: Mapping[str, float],
    losses: Mapping[str, float],
    seconds: list[Mapping[str, float]],
    computing: list[float],
) -> EpochReport:
    """The results of an epoch that was trained and evaluated.

    Args:
        losses: the losses that are minimized, each with its scale.
        seconds: the seconds of every rank, by activity.
        computing: the share of every rank's computing.
    """
    current = epoch.current
    rates = epoch.current.rates
    step = session.progress.step
    end = current.position if current.ended_by else epoch.plan.num_batches
    last_rate = rates.last if rates.updates else epoch.learning_rate
    columns = feed.lengths_in(current.epoch) if session.comm.rank == 0 else {}  # only rank 0 shows the speed
    report = EpochReport(
        epoch=current.epoch,
        steps=step - current.first_step,
        global_step=step,
        elapsed=current.elapsed,
        computing=current.computing / current.elapsed,
        learning_rate=last_rate,
        num_sequences=feed.passes * feed.sequences_among(epoch.plan.indices_between(0, end)),
        scores=scores,
        padding=feed.padding(epoch.plan, current.epoch),
        seconds=seconds,
        computing_of_ranks=computing,
        loss_scale=session.learner.meter.loss_scale,
        syncs=current.syncs,
        sent=current.sent,
        sent_between_groups=current.sent_between_groups,
        seconds_before=epoch.seconds_before,
        learning_rates=rates.summary(),
        epoch_learning_rate=None if epoch.learning_rate == last_rate else epoch.learning_rate,
        losses=losses,
        diverged=has_diverged(session.progress.history, scores, losses, name_scores("train", current.initial)) or None,
        splits=current.splits,
        skipped=current.skipped,
        updated=current.updated,
        broken=current.left_out or None,
        goodput=session.goodput.entries(),
        num_frames={name: feed.passes * epoch.plan.num_frames(column, 0, end) for name, column in columns.items()},
        memory=peak_memory(session.learner.meter),
    )
    return replace(report, measures={name: measure(report) for name, measure in session.measures.items()})


def log_training(report: EpochReport) -> None:
    """Log what is known before the epoch is saved."""
    for level, line in report.training_lines():
        log.write(level, line)


def log_epoch(report: EpochReport, datasets: Sequence[str], history: Sequence[EpochRecord], initial: Mapping[str, float]) -> None:
    """Log the scores of an epoch, and a warning if its losses have exploded.

    Args:
        datasets: the names of the evaluated datasets.
        initial: the losses and errors of the epoch's first batch.
    """
    for line in report.score_lines(datasets):
        log.write(5, line)
    for line in divergence_lines(history, name_scores("train", initial), report.learning_rate):
        log.warning(line)
