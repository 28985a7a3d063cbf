"""The loop: epochs, steps, evaluation, saving. Sees contracts only: no tensor, no launcher, no file format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.comm.base import together
from hvdtrain.data.feed import naming
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.plan.order_keys import ORDER_VERSION, changed_since
from hvdtrain.data.plan.shared import differences
from hvdtrain.data.types import Batch
from hvdtrain.errors import BY_CTRL_C, TO_BE_CONTINUED, CheckpointError, DataError, HvdtrainError
from hvdtrain.learner.base import NotFinite
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate
from hvdtrain.learner.steps import RoundsPerUpdate, groups
from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.json_lines import as_line
from hvdtrain.report.steps import Reporters, StepNumbers, work_of
from hvdtrain.runtime import log
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.runtime.scores import Scores, of_dataset
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import complete_history, exploded_lines, minimized_in, with_totals
from hvdtrain.session import Session
from hvdtrain.training.account import Account
from hvdtrain.training.agreement import INTERVAL, LOCAL_UPDATES_INTERVAL, StopRequests, StopVote, completed_share, plan_together
from hvdtrain.training.callbacks import EVENTS, Callbacks, Training
from hvdtrain.training.evaluation import evaluate, not_finite
from hvdtrain.training.step_log import Listener, ScoreBuffer, StepLog, StepReport
from hvdtrain.training.trace import StepRecorder, record_nothing

REPORTS = "reports to services"
"""What takes as long as it needs, beside the callbacks."""

UNCHANGED_KEYS = "go on with the same data and the same keys for batches"


@dataclass(frozen=True)
class Rates:
    """The learning rate: `of_epoch(epoch, history)` before an epoch, `of_step(step, epoch_continuous, epoch_rate)` for an update.

    `of_step` gives the rate that the optimizer uses for the update that ends a step, scaled by the number of ranks if
    `horovod_scale_lr` asks for it. `step` is the number of steps done before it; `epoch_continuous` the number of epochs done
    before the first step of the update, of the current epoch the share of its sequences.
    """

    of_epoch: Callable[[int, list[EpochRecord]], float]
    of_step: Callable[[int, float, float], float]


@dataclass(frozen=True)
class TrainingLimits:
    """How often to update and to save, and when to end.

    Attributes:
        num_epochs: the last epoch.
        ends_early: why training ends after the epochs of a history; None: it goes on.
        save_epochs: save after every N epochs, and after the last one.
        save_steps: save within an epoch, too, after every N steps of the whole training; None: do not.
        save_minutes: save within an epoch, too, when the last checkpoint is this many minutes old; None: do not.
        rounds_per_update: gives the number of steps whose gradients an update adds up.
        finite: end with an error when a training loss is not a finite number.
        mistake: the error to end with after the epochs of a history, once the last one is saved and reported; None: go on.
    """

    num_epochs: int
    ends_early: Callable[[list[EpochRecord]], str | None] = lambda _: None
    save_epochs: int = 1
    save_steps: int | None = None
    save_minutes: float | None = None
    rounds_per_update: RoundsPerUpdate = lambda *_: 1
    finite: bool = True
    mistake: Callable[[list[EpochRecord]], HvdtrainError | None] = lambda _: None


class Engine:
    """Trains epoch after epoch. All ranks run it alike, in step.

    Args:
        session: train is the first of its datasets; the others are evaluated after every epoch. Its progress is kept up to date.
        reporters: receive the reports of finished epochs and the records of steps.
        step_log: logs the progress within an epoch.
        trace: called with the sequences of every step.
        callbacks: those of the config, of this rank.
    """

    def __init__(
        self,
        session: Session,
        rates: Rates,
        limits: TrainingLimits,
        reporters: Reporters,
        step_log: StepLog,
        trace: StepRecorder = record_nothing,
        callbacks: Callbacks | None = None,
    ) -> None:
        self._session = session
        self._comm = session.comm
        self._learner = session.learner
        self._timer = session.timer
        self._progress = session.progress
        self._train, *self._evaluations = session.feeds
        self._rates = rates
        self._limits = limits
        self._reporters = reporters
        self._numbers = StepNumbers(reporters.steps, session.timer, session.learner.meter) if reporters.steps else None
        self._step_log = step_log
        self._trace = trace
        self._callbacks = Callbacks() if callbacks is None else callbacks
        self._subscribed_events: set[str] = set()  # the events of callbacks, and REPORTS, that any rank has
        self._training = Training(session.comm, session.learner, session.progress)  # what the callbacks see
        interval = INTERVAL if session.reducer.gradients.steps is None else LOCAL_UPDATES_INTERVAL
        self._stop_vote = StopVote(session.comm, session.learner.numbers, interval)
        self._score_buffer = ScoreBuffer(session.learner.meter)  # this rank's scores that the ranks have not gathered yet
        self._account: Account | None = None  # of the batches in these scores, within an epoch
        self._not_finite: list[NotFinite] = []
        self._counted_until = 0.0  # the time up to which the epoch's seconds are counted
        self._counted_sync = 0.0  # the seconds of parameter averaging that are counted
        self._counted_traffic = (0, 0)  # syncs and bytes that an epoch has already
        self._saved_at = time.monotonic()
        self._asked_to_save = False
        self._last_checked_step = session.progress.step  # after which the ranks' wishes were last looked at
        self._finished_by: str | None = None  # why a callback has training end after this epoch

    def run(self) -> None:
        """Train up to the last epoch.

        Raises:
            Stopped: on all ranks after the same step, with a checkpoint.
            TrainingError: a loss is not a finite number.
            ConfigError: the config names a score that the epoch does not have; with a checkpoint.
        """
        self._session.interrupt.defer_sigint()
        own = {event for event in EVENTS if self._callbacks.have(event)} | ({REPORTS} if self._reporters.services else set())
        self._subscribed_events = set().union(*self._comm.gather(own, name="callback_events"))
        self._notify("on_train_begin")
        end = None
        while end is None and self._progress.epoch < self._limits.num_epochs:
            self._run_epoch(self._progress.epoch + 1)
            end = self._ends_early()
        self._finish()
        self._training.stopped_by = end
        self._notify("on_stop")
        log.info(f"Finished training in epoch {self._progress.epoch}{f': {end}' if end else ''}.")

    def _run_epoch(self, epoch: int) -> None:
        """Train, evaluate, save and report one epoch, or what is left of it."""
        progress = self._progress
        self._timer.take()
        started = self._counted_until = time.perf_counter()
        self._counted_sync = 0.0
        current = progress.current = progress.current or EpochProgress(epoch, progress.step)
        before = current.elapsed
        epoch_rate = self._rates.of_epoch(epoch, progress.history)
        self._session.watchdog.beat(f"epoch {epoch}, planning", "planning")
        plan = plan_together(self._comm, self._train, epoch)
        self._session.watchdog.beat(f"epoch {epoch}, before its steps", "between")
        completed = completed_share(self._comm, self._train, plan, self._learner.numbers)
        effective = self._rates.of_step(progress.step, epoch - 1.0 + completed(current.position), epoch_rate)
        log.detail(f"start epoch {epoch} global train step {progress.step} with effective learning rate {effective:.6g} ...")
        self._training.learning_rate = effective
        self._notify("on_epoch_begin")

        if not current.trained:
            self._train_epoch(plan, current, completed, epoch_rate, effective)
        if epoch == 1:
            self._warn_of_means(plan, current)
        scores = of_dataset("train", current.scores.means())
        losses = current.scores.scales() or dict(minimized_in(progress.history))
        scores = self._training.scores = with_totals(self._evaluate(current, scores), losses)
        self._notify("on_epoch_end")

        rates = current.rates
        learning_rate = rates.last if rates.updates else epoch_rate
        report = EpochReport(
            epoch=epoch,
            steps=progress.step - current.first_step,
            global_step=progress.step,
            elapsed=current.elapsed,
            computing=current.computing / current.elapsed,
            learning_rate=learning_rate,
            num_sequences=self._train.num_sequences(plan),
            scores=scores,
            padding=plan.padding(self._train.lengths_in(epoch)),
            seconds=self._seconds(started),
            loss_scale=self._learner.meter.loss_scale,
            syncs=current.syncs,
            sent=current.sent,
            seconds_before=before,
            learning_rates=rates.summary(),
            epoch_learning_rate=None if epoch_rate == learning_rate else epoch_rate,
            losses=losses,
        )
        progress.epoch, progress.current, progress.report = epoch, None, as_line(report)
        progress.history = [*complete_history(progress.history, losses), EpochRecord(epoch, epoch_rate, scores, losses)]
        mistake = self._limits.mistake(progress.history)
        if mistake is not None or self._is_to_be_saved(epoch):
            self._save()
        report = replace(report, seconds=self._seconds(started))  # now with the seconds of saving
        for level, line in report.lines([feed.name for feed in self._evaluations]):
            log.write(level, line)
        for line in exploded_lines(progress.history, of_dataset("train", current.initial), learning_rate):
            log.warning(line)
        for reporter in self._reporters.epochs:
            reporter.epoch(report)
        if REPORTS in self._subscribed_events:
            with self._without_timeout(f"{REPORTS} of epoch {epoch}"):
                for service in self._reporters.services:
                    service.epoch(report)
        if mistake is not None:
            self._finish()
            raise mistake

    def _train_epoch(
        self, plan: Plan, current: EpochProgress, completed: Callable[[int], float], epoch_rate: float, first_rate: float
    ) -> None:
        """Collective. The steps of an epoch that are not done yet. Afterwards `current` has the scores of all ranks.

        Args:
            completed: the share of the epoch's sequences that precede a position.
            first_rate: the effective learning rate with which the epoch begins, or goes on.
        """
        progress = self._progress
        share = self._train.share(plan, current.position)
        counts = self._agree_on_rounds(plan, len(share), current)
        rounds = max(counts)
        shared = self._train.distribution == "shard"
        rate = current.rates.last if current.rates.updates else None  # of the last update

        def epoch_continuous() -> float:
            return current.epoch - 1 + completed(current.position)

        def next_group_size() -> int:
            return self._limits.rounds_per_update(current.epoch, epoch_continuous(), progress.step)

        self._step_log.begin(current.epoch, None, rounds, self._elapsed(current), self._listener(plan, current, first_rate))
        self._learner.begin_epoch(current.epoch, progress.step)
        self._session.reducer.sync.begin_epoch(
            self._learner.state, self._epoch_start(current, rounds, next_group_size(), first_rate)
        )
        self._account = Account(self._train, plan, current.position)
        with self._train.read(share, current.epoch, self._learner.staging) as batches:
            for group in groups(rounds, next_group_size):  # the steps of one update
                # Before the first of them: an update is at the same place however many batches its sequences are divided into.
                begun = epoch_continuous()
                for done in group:
                    batch = self._next(batches, current)
                    with self._timer.span("compute"), naming(batch, self._train.source):
                        self._learner.backward(batch, is_last_microbatch=done == group[-1])
                        if done == group[-1]:
                            rate = self._rates.of_step(progress.step, begun, epoch_rate)
                            self._learner.update(rate)
                            self._training.learning_rate = rate
                            current.rates.add(rate)
                    progress.step += 1
                    current.position += sum(count > done for count in counts) if shared else 1
                    number = progress.step - current.first_step
                    self._step_log.step(StepReport(number, completed(current.position), rate, batch, self._score_buffer))
                    self._callbacks.tell("on_step_end", self._training)
                ranks_with_batch = sum(count > group[0] for count in counts)  # who has any has one in the group's first step
                update = FinishedUpdate(len(share) > group[0], ranks_with_batch, progress.step, rate or 0.0)
                self._session.reducer.sync.after_update(self._learner.state, update)
                self._check(current)
        self._session.reducer.sync.end_of_epoch(self._learner.state)
        self._gather_scores(current)
        self._step_log.finish()
        self._score_buffer = ScoreBuffer(self._learner.meter)
        self._count(current)
        current.trained = True

    def _warn_of_means(self, plan: Plan, current: EpochProgress) -> None:
        """Warn of losses that are one number per batch: of a mean, ranks and batches of different size weigh the same."""
        for name, count in current.scores.counts().items():
            if count == current.position < self._train.num_sequences(plan):
                log.warning(
                    f"{name}: train_step marks one number per batch; mark one per element (reduction='none'), so that the result "
                    "does not depend on the batches and on the number of ranks",
                )

    def _listener(self, plan: Plan, current: EpochProgress, first_rate: float) -> Listener | None:
        """What records the steps of an epoch that the log has lines about; None: nobody receives records."""
        numbers = self._numbers
        if numbers is None:
            return None
        numbers.begin(work_of(plan, self._train.lengths_in(current.epoch), self._train.sequences_among), current.position)

        def record(report: StepReport, scores: Mapping[str, float]) -> None:
            numbers.step(
                epoch=current.epoch,
                step=report.number,
                global_step=current.first_step + report.number,
                position=current.position,
                progress=report.complete,
                elapsed=self._elapsed(current),
                learning_rate=first_rate if report.learning_rate is None else report.learning_rate,
                scores=scores,
            )

        return record

    def _elapsed(self, current: EpochProgress) -> float:
        """Seconds that the training of the epoch has taken so far."""
        return current.elapsed + time.perf_counter() - self._counted_until

    def _epoch_start(self, current: EpochProgress, rounds: int, group_size: int, rate: float) -> EpochStart:
        """What the reducer may know of an epoch of which `rounds` steps are left."""
        done = self._progress.step - current.first_step
        return EpochStart(current.epoch, self._progress.step, -(-(done + rounds) // group_size), rate, goes_on=done > 0)

    def _evaluate(self, current: EpochProgress, scores: dict[str, float]) -> dict[str, float]:
        """Collective. The scores of training, and those of the other datasets."""
        self._training.scores = scores
        for feed in self._evaluations:
            with self._timer.span("evaluation"), self._learner.state.averaged():
                self._training.dataset = feed.name
                self._notify("on_evaluation_begin")
                means = evaluate(
                    self._comm,
                    self._learner,
                    self._session.watchdog,
                    feed,
                    current.epoch,
                    after_step=lambda: self._check(current),
                    step_log=self._step_log,
                )
                scores = {**scores, **of_dataset(feed.name, means)}
                self._training.scores = scores
                self._notify("on_evaluation_end")
                self._training.dataset = None
        return scores

    def _next(self, batches: Iterator[Batch], current: EpochProgress) -> Batch | None:
        """This rank's next batch; None: it has none left."""
        self._session.watchdog.beat(f"epoch {current.epoch}, step {self._progress.step - current.first_step}", "steps")
        with self._timer.span("data wait"):
            batch = next(batches, None)
        if batch is not None and self._account is not None:
            self._account.add(batch.indices)
            self._trace(current.epoch, self._progress.step, batch.indices)
        return batch

    def _agree_on_rounds(self, plan: Plan, own: int, current: EpochProgress) -> list[int]:
        """Collective. The number of batches each rank has left. Checks that all ranks planned the same epoch, as at its begin."""
        answers = self._comm.gather((own, plan.fingerprint(), plan.num_batches), name="plan")
        made = [fingerprint for _, fingerprint, _ in answers]
        error: HvdtrainError | None = None
        if self._train.distribution == "shard":
            others = [rank for rank, fingerprint in enumerate(made) if fingerprint != made[0]]
            if others:
                error = DataError(
                    f"{self._train.name}: expected the same sequences on all ranks, got others on rank {others[0]} "
                    "(are the files the same on all hosts?)"
                )
            made = made[:1]
        plan_inputs = self._train.plan_inputs(current.epoch)
        if current.fingerprints and current.fingerprints != made:
            changed = changed_since(current.order_version, self._train.order_keys, current.epoch)
            differing = differences(current.made_from, plan_inputs)
            same = "go on with what was expected" if differing else UNCHANGED_KEYS
            why = f"{changed}: go on with the version of hvdtrain that wrote the checkpoint" if changed else same
            error = CheckpointError(
                f"epoch {current.epoch}: expected the batches it began with, got others after {current.position} of them"
                f"{differing and ': '}{differing} ({why}, or remove the checkpoint within the epoch to repeat the epoch from its "
                "beginning)"
            )
        elif current.position > (most := max(num_batches for _, _, num_batches in answers)):
            error = CheckpointError(
                f"{self._progress.file}: expected a position of at most {most}, the batches of epoch {current.epoch}, got "
                f"{current.position} (remove the checkpoint within the epoch to repeat the epoch from its beginning)"
            )
        if error is not None:
            raise error.on_all_ranks()
        current.fingerprints, current.order_version, current.made_from = made, ORDER_VERSION, plan_inputs
        return [count for count, _, _ in answers]

    def _check(self, current: EpochProgress) -> None:
        """Collective. After every update and every step of an evaluation: save, stop or give up if a rank wants that."""
        wanted = self._stop_vote.step(self._stop_requests)
        if wanted.report:
            raise self._not_finite_error(current)
        if wanted.stop or wanted.stop_by_hand:
            self._stop(current, BY_CTRL_C if wanted.stop_by_hand else TO_BE_CONTINUED)
        every, step, before = self._limits.save_steps, self._progress.step, self._last_checked_step
        self._last_checked_step = step
        if not current.trained and (wanted.save or (every is not None and step // every > before // every)):
            self._save()

    def _stop_requests(self) -> StopRequests:
        """What this rank wants."""
        reason = self._stop_reason()
        by_hand = reason == "SIGINT"
        due = self._is_save_due() and not self._asked_to_save  # once: it takes two exchanges until it is done
        self._asked_to_save = self._asked_to_save or due
        self._not_finite += self._learner.meter.take_not_finite()
        broken = self._limits.finite and bool(self._not_finite)
        return StopRequests(
            stop=int(reason is not None and not by_hand), stop_by_hand=int(by_hand), save=int(due), report=int(broken)
        )

    def _stop_reason(self) -> str | None:
        """Why this rank wants to stop; None: it does not."""
        asked = self._training.wants_stop
        return self._session.interrupt.reason or (None if asked is None else f"a callback ({asked})")

    def _stop(self, current: EpochProgress, status: int) -> None:
        """Collective. End with a checkpoint."""
        reasons = self._comm.gather(self._stop_reason(), name="reasons")
        self._save()
        reason = next(reason for reason in reasons if reason is not None)
        done = f"after step {self._progress.step - current.first_step}" + (", in the evaluation" if current.trained else "")
        self._finish()
        self._training.stopped_by = reason
        self._notify("on_stop")
        raise Stopped(
            f"stopped by {reason} in epoch {current.epoch} {done}; the same command goes on from there",
            status,
            repeatable=reason != "SIGTERM",  # with which torchrun ends ranks before it starts them with others
        )

    def _save(self) -> None:
        """Collective. Write a checkpoint; one within an epoch has the epoch's scores and seconds so far.

        Raises:
            DataError: a data file was changed, perhaps before the model was trained on it; nothing is written.
        """
        together(self._comm, self._check_files, name="files")
        current = self._progress.current
        if current is not None and not current.trained:
            self._gather_scores(current)
            self._count(current)
        self._session.watchdog.beat(f"step {self._progress.step}, saving", "saving")
        with self._timer.span("saving"):
            checkpoint = self._session.saver.save(self._progress)
        self._session.watchdog.beat(f"step {self._progress.step}, after saving", "between")
        self._saved_at = time.monotonic()
        self._asked_to_save = False
        if checkpoint is not None:
            self._training.checkpoint = checkpoint.model_file
            self._notify("on_save")

    def _check_files(self) -> None:
        """Raises: DataError, if a data file has changed since the start. The plan of the next epoch would find it, too."""
        for feed in (self._train, *self._evaluations):
            if feed.files is not None:
                feed.files.check()

    def _is_save_due(self) -> bool:
        """Whether the last checkpoint is too old, by the clock of rank 0."""
        minutes = self._limits.save_minutes
        return minutes is not None and self._comm.rank == 0 and time.monotonic() - self._saved_at >= 60 * minutes

    def _is_to_be_saved(self, epoch: int) -> bool:
        is_last = epoch >= self._limits.num_epochs or self._ends_early() is not None
        return epoch % self._limits.save_epochs == 0 or is_last

    def _ends_early(self) -> str | None:
        """After an epoch, why training ends with it, before its last epoch; None: it does not."""
        return self._finished_by or self._limits.ends_early(self._progress.history)

    def _finish(self) -> None:
        """Collective. Wait for the last exchange of wishes, and for what is saved in the background."""
        self._stop_vote.finish()
        self._session.watchdog.beat(f"step {self._progress.step}, waiting for the last checkpoint", "finishing")
        self._session.saver.finish()

    def _notify(self, event: str) -> None:
        """Collective. Call the callbacks."""
        if event in self._subscribed_events:
            with self._without_timeout(f"{event} of a callback"):
                self._callbacks.tell(event, self._training)

    @contextmanager
    def _without_timeout(self, what: str) -> Iterator[None]:
        """Collective. Around code of the user's, which may take as long as it needs on any rank: the others wait here."""
        self._session.watchdog.beat(what, "unhurried")
        yield
        self._comm.gather(None, name="unhurried")
        self._session.watchdog.beat(f"after {what}", "between")

    def _gather_scores(self, current: EpochProgress) -> None:
        """Collective. Add the ranks' scores since the last time to the epoch's.

        Raises:
            TrainingError: a loss is not a finite number, or too many updates in a row were skipped.
            DataError: the ranks did not train on what was planned.
        """
        self._learner.flush()
        own = self._score_buffer.take_all()
        self._not_finite += self._learner.meter.take_not_finite()
        used = None if self._account is None else self._account.take(current.position)
        gathered = self._comm.gather((own, bool(self._not_finite), used), name="train_scores")
        if not current.scores.counts():
            current.initial = Scores.merged(scores for scores, *_ in gathered).first()
        current.scores = Scores.merged([current.scores, *(scores for scores, *_ in gathered)]).compact()
        if self._limits.finite and any(broken for _, broken, _ in gathered):
            raise self._not_finite_error(current)
        if self._account is not None:
            self._account.check(f"epoch {current.epoch}", [entry for *_, entry in gathered if entry is not None])

    def _not_finite_error(self, current: EpochProgress) -> HvdtrainError:
        """Collective."""
        return not_finite(self._comm, self._train.dataset, self._not_finite, current.epoch, current.first_step)

    def _count(self, current: EpochProgress) -> None:
        """Add the seconds, syncs and bytes since the last time to the epoch's."""
        syncs, sent = self._session.reducer.traffic
        current.syncs += syncs - self._counted_traffic[0]
        current.sent += sent - self._counted_traffic[1]
        self._counted_traffic = syncs, sent
        now = time.perf_counter()
        current.elapsed += now - self._counted_until
        self._counted_until = now
        # Steps as the device saw them, collectives included, and the averaging of parameters between them.
        synced = self._timer.seconds.get("parameter sync", 0.0)
        current.computing += self._learner.meter.take_step_seconds() + synced - self._counted_sync
        self._counted_sync = synced

    def _seconds(self, started: float) -> list[Mapping[str, float]]:
        """Collective. By rank, the seconds since it began or resumed the epoch, by what they were spent on.

        Takes note whether a callback of any rank wants training to end with this epoch.
        """
        seconds = dict(self._timer.seconds)
        rest = time.perf_counter() - started - sum(seconds.values())
        gathered = self._comm.gather(({**seconds, "rest": rest}, self._training.wants_finish), name="seconds")
        self._finished_by = next((reason for _, reason in gathered if reason is not None), None)
        return [own for own, _ in gathered]
