"""The loop: epochs, steps, evaluation, saving. Sees contracts only: no tensor, no launcher, no file format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from hvdtrain.checkpoint.progress import Progress, Within
from hvdtrain.checkpoint.saver import Saves
from hvdtrain.comm.base import Communicator, together
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Batch
from hvdtrain.errors import CheckpointError, DataError, HvdtrainError
from hvdtrain.learner.accumulation import RoundsPerUpdate, groups
from hvdtrain.learner.base import Learner, NotFinite
from hvdtrain.learner.reducer import Reducer
from hvdtrain.report.epoch import EpochReport, Reporter
from hvdtrain.report.json_lines import as_line
from hvdtrain.runtime.interrupt import BY_CTRL_C, TO_BE_CONTINUED, Interrupt, Stopped
from hvdtrain.runtime.log import say
from hvdtrain.runtime.scores import Scores
from hvdtrain.runtime.timer import Timer
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.training import votes as ballot
from hvdtrain.training.evaluation import evaluate, not_finite
from hvdtrain.training.step_log import StepLog
from hvdtrain.training.trace import Note, no_trace
from hvdtrain.training.votes import Ballot, Wishes


@dataclass(frozen=True)
class Rates:
    """The learning rate: `of_epoch(epoch, history)` before an epoch, `of_step(step, epoch_continuous, epoch_rate)` for an update.

    `of_step` gives the rate that the optimizer gets for the update that ends a step, scaled by the number of ranks if the config
    asks for it. `step` is the number of steps done before it.
    """

    of_epoch: Callable[[int, list[EpochRecord]], float]
    of_step: Callable[[int, float, float], float]


@dataclass(frozen=True)
class Pace:
    """When to save, to tell, and to end.

    Attributes:
        num_epochs: train up to this epoch.
        ends_early: why no epoch is to follow those of a history; None: go on.
        save_epochs: save after every N epochs, and after the last one.
        save_steps, save_minutes: save within an epoch, too, after every N steps, or minutes; None: do not.
        rounds_per_update: gives the number of steps whose gradients an update adds up.
        finite: end if a loss is not finite.
    """

    num_epochs: int
    ends_early: Callable[[list[EpochRecord]], str | None] = lambda _: None
    save_epochs: int = 1
    save_steps: int | None = None
    save_minutes: float | None = None
    rounds_per_update: RoundsPerUpdate = lambda *_: 1
    finite: bool = True


class Engine:
    """Trains from one epoch to another. All ranks run it alike, in step.

    Args:
        evaluations: datasets that are evaluated after every epoch.
        progress: where training stands; it is kept up to date.
        step_log: tells of the steps.
        trace: told what every step trains on.
    """

    def __init__(
        self,
        comm: Communicator,
        learner: Learner,
        reducer: Reducer,
        train: Feed,
        evaluations: list[Feed],
        rates: Rates,
        saver: Saves,
        reporters: list[Reporter],
        timer: Timer,
        watchdog: Watchdog,
        interrupt: Interrupt,
        *,
        progress: Progress,
        pace: Pace,
        step_log: StepLog,
        trace: Note = no_trace,
    ) -> None:
        self._comm = comm
        self._learner = learner
        self._reducer = reducer
        self._train = train
        self._evaluations = evaluations
        self._rates = rates
        self._saver = saver
        self._reporters = reporters
        self._timer = timer
        self._watchdog = watchdog
        self._interrupt = interrupt
        self._progress = progress
        self._pace = pace
        self._step_log = step_log
        self._trace = trace
        meets_in_every_step = reducer.updates_without_batch
        self._ballot = Ballot(comm, learner.numbers, ballot.INTERVAL if meets_in_every_step else ballot.INTERVAL_APART)
        self._scores: list[Scores] = []  # this rank's, not yet brought together with the others'
        self._not_finite: list[NotFinite] = []
        self._since = self._synced = 0.0  # up to when and to what the epoch's seconds are counted
        self._saved_when = time.monotonic()
        self._asked_to_save = False
        self._heeded = progress.step  # the number of steps done when wishes were last looked at

    def run(self) -> None:
        """Train up to the last epoch.

        Raises:
            Stopped: on all ranks at the same step, after a checkpoint.
            TrainingError: a loss is no finite number.
        """
        self._interrupt.may_wait()
        end = None
        while end is None and self._progress.epoch < self._pace.num_epochs:
            self._run_epoch(self._progress.epoch + 1)
            end = self._pace.ends_early(self._progress.history)
        self._ballot.finish()
        self._saver.finish()
        say(3, f"Finished training in epoch {self._progress.epoch}{f': {end}' if end else ''}.")

    def _run_epoch(self, epoch: int) -> None:
        """Train, evaluate, save and report one epoch, or what is left of it."""
        progress = self._progress
        self._timer.take()
        started = self._since = time.perf_counter()
        self._synced = 0.0
        within = progress.within = progress.within or Within(epoch, progress.step)
        epoch_rate = self._rates.of_epoch(epoch, progress.history)
        plan = together(self._comm, lambda: self._train.plan(epoch), name="plan_train")
        effective = self._rates.of_step(progress.step, epoch - 1.0, epoch_rate)
        say(4, f"start epoch {epoch} global train step {progress.step} with effective learning rate {effective:.6g} ...")

        if not within.trained:
            self._train_epoch(plan, within, epoch_rate)
        scores = {f"train_loss_{name}": mean for name, mean in within.scores.means().items()}
        for feed in self._evaluations:
            with self._timer.span("evaluation"), self._learner.state.averaged():
                means = evaluate(
                    self._comm, self._learner, self._watchdog, feed, epoch, lambda: self._heed(within), self._step_log
                )
            scores |= {f"{feed.name}_loss_{name}": mean for name, mean in means.items()}

        report = EpochReport(
            epoch=epoch,
            steps=progress.step - within.first_step,
            global_step=progress.step,
            elapsed=within.elapsed,
            computing=within.computing / within.elapsed,
            learning_rate=epoch_rate,
            num_sequences=self._train.num_sequences(plan),
            scores=scores,
            padding=plan.padding(self._train.lengths_in(epoch)),
            seconds=self._seconds(started),
            loss_scale=self._learner.meter.loss_scale,
        )
        progress.epoch, progress.within, progress.report = epoch, None, as_line(report)
        progress.history.append(EpochRecord(epoch, epoch_rate, scores))
        if self._is_to_be_saved(epoch):
            self._save()
        report = replace(report, seconds=self._seconds(started))
        for level, line in report.lines([feed.name for feed in self._evaluations]):
            say(level, line)
        for reporter in self._reporters:
            reporter.epoch(report)

    def _train_epoch(self, plan: Plan, within: Within, epoch_rate: float) -> None:
        """Collective. The steps of an epoch that are not done yet; its scores are then brought together in `within`."""
        progress = self._progress
        share = self._train.share(plan, within.position)
        counts = self._agree_on_rounds(plan, len(share), within)
        rounds = max(counts)
        shared = self._train.distribution == "shard"
        total = within.position + (sum(counts) if shared else rounds)
        rate: float | None = None  # of the last update

        def continuous() -> float:
            return within.epoch - 1 + within.position / total

        def next_size() -> int:
            return self._pace.rounds_per_update(within.epoch, continuous(), progress.step)

        self._step_log.begin(within.epoch, None, rounds, within.elapsed + time.perf_counter() - self._since)
        self._learner.begin_epoch(within.epoch, progress.step)
        with self._train.read(share, within.epoch) as batches:
            for group in groups(rounds, next_size):
                for done in group:
                    batch = self._next(batches, within)
                    with self._timer.span("compute"):
                        self._learner.backward(batch, "update" if done == group[-1] else "accumulate")
                        if done == group[-1]:
                            rate = self._rates.of_step(progress.step, continuous(), epoch_rate)
                            self._learner.update(rate)
                    progress.step += 1
                    within.position += sum(count > done for count in counts) if shared else 1
                    number, complete = progress.step - within.first_step, within.position / total
                    self._step_log.step(number, complete, self._take_scores, rate, batch, self._learner.meter.peak_memory)
                with_batch = sum(count > group[0] for count in counts)  # who has one at all has one in the first round
                self._reducer.after_update(self._learner.state, len(share) > group[0], with_batch)
                self._heed(within)
        self._step_log.end()
        self._reducer.end_of_epoch(self._learner.state)
        self._gather_scores(within)
        self._count_seconds(within)
        within.trained = True

    def _next(self, batches: Iterator[Batch], within: Within) -> Batch | None:
        """This rank's next batch; None: it has none left."""
        self._watchdog.beat(f"epoch {within.epoch}, step {self._progress.step - within.first_step}")
        with self._timer.span("data wait"):
            batch = next(batches, None)
        if batch is not None:
            self._trace(within.epoch, self._progress.step, batch.indices)
        return batch

    def _agree_on_rounds(self, plan: Plan, own: int, within: Within) -> list[int]:
        """Collective. How many batches each rank has left. Makes sure that all planned the same epoch, and the same as before."""
        answers = self._comm.gather((own, plan.fingerprint()), name="plan")
        made = [fingerprint for _, fingerprint in answers]
        error: HvdtrainError | None = None
        if self._train.distribution == "shard":
            others = [rank for rank, fingerprint in enumerate(made) if fingerprint != made[0]]
            if others:
                error = DataError(
                    f"{self._train.name}: expected the same sequences on all ranks, got others on rank {others[0]} "
                    "(are the files the same on all hosts?)"
                )
            made = made[:1]
        if within.fingerprints and within.fingerprints != made:
            error = CheckpointError(
                f"epoch {within.epoch}: expected the batches that it was begun with, got others after {within.position} of them "
                "(go on with the data and the keys for batches that it was begun with, or remove the checkpoint within the epoch "
                "to repeat the epoch from its beginning)"
            )
        if error is not None:
            error.on_every_rank = True
            raise error
        within.fingerprints = made
        return [count for count, _ in answers]

    def _heed(self, within: Within) -> None:
        """Collective. After every update and every step of an evaluation: save, stop or give up, where a rank wants that."""
        wanted = self._ballot.step(self._wishes)
        if wanted.report:
            raise not_finite(self._comm, self._train.dataset, self._not_finite, within)
        if wanted.stop or wanted.stop_by_hand:
            self._stop(within, BY_CTRL_C if wanted.stop_by_hand else TO_BE_CONTINUED)
        every, step, before = self._pace.save_steps, self._progress.step, self._heeded
        self._heeded = step
        if not within.trained and (wanted.save or (every is not None and step // every > before // every)):
            self._save()

    def _wishes(self) -> Wishes:
        """What this rank wants."""
        reason = self._interrupt.reason
        by_hand = reason == "SIGINT"
        due = self._is_save_due() and not self._asked_to_save  # once: it takes two exchanges until it is done
        self._asked_to_save = self._asked_to_save or due
        self._not_finite += self._learner.meter.take_not_finite()
        broken = self._pace.finite and bool(self._not_finite)
        return Wishes(stop=int(reason is not None and not by_hand), stop_by_hand=int(by_hand), save=int(due), report=int(broken))

    def _stop(self, within: Within, status: int) -> None:
        """Collective. End with a checkpoint."""
        reasons = self._comm.gather(self._interrupt.reason, name="reasons")
        self._save()
        reason = next(reason for reason in reasons if reason is not None)
        done = f"after step {self._progress.step - within.first_step}" + (", in the evaluation" if within.trained else "")
        stopped = Stopped(f"stopped by {reason} in epoch {within.epoch} {done}; the same command goes on from there", status)
        stopped.on_every_rank = True
        self._ballot.finish()
        self._saver.finish()
        raise stopped

    def _save(self) -> None:
        """Collective. Write a checkpoint, of an epoch under way together with its scores and seconds up to here."""
        within = self._progress.within
        if within is not None and not within.trained:
            self._gather_scores(within)
            self._count_seconds(within)
        self._watchdog.beat(f"step {self._progress.step}, saving")
        with self._timer.span("saving"):
            self._saver.save(self._progress)
        self._saved_when = time.monotonic()
        self._asked_to_save = False

    def _is_save_due(self) -> bool:
        """Whether rank 0, whose clock counts, finds the last checkpoint too old."""
        minutes = self._pace.save_minutes
        return minutes is not None and self._comm.rank == 0 and time.monotonic() - self._saved_when >= 60 * minutes

    def _is_to_be_saved(self, epoch: int) -> bool:
        is_last = epoch >= self._pace.num_epochs or self._pace.ends_early(self._progress.history) is not None
        return epoch % self._pace.save_epochs == 0 or is_last

    def _take_scores(self) -> Scores:
        """This rank's scores since the last time, which are kept."""
        self._scores.append(self._learner.meter.take_scores())
        return self._scores[-1]

    def _gather_scores(self, within: Within) -> None:
        """Collective. Bring the ranks' scores together. Raises: TrainingError, where a loss was no finite number."""
        self._take_scores()
        own = Scores.merged(self._scores)
        self._not_finite += self._learner.meter.take_not_finite()
        parts = self._comm.gather((own, bool(self._not_finite)), name="train_scores")
        within.scores = Scores.merged([within.scores, *(scores for scores, _ in parts)]).compact()
        self._scores = []
        if self._pace.finite and any(broken for _, broken in parts):
            raise not_finite(self._comm, self._train.dataset, self._not_finite, within)

    def _count_seconds(self, within: Within) -> None:
        """Add the seconds since the last time to the epoch's."""
        now = time.perf_counter()
        within.elapsed += now - self._since
        self._since = now
        # Steps as the device saw them, collectives included, and the averaging of parameters between them.
        synced = self._timer.seconds.get("parameter sync", 0.0)
        within.computing += self._learner.meter.take_step_seconds() + synced - self._synced
        self._synced = synced

    def _seconds(self, started: float) -> list[Mapping[str, float]]:
        """Collective. Where each rank's time went since it began with the epoch, or went on with it."""
        seconds = dict(self._timer.seconds)
        rest = time.perf_counter() - started - sum(seconds.values())
        return self._comm.gather({**seconds, "rest": rest}, name="seconds")
