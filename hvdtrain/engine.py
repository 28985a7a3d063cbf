"""The loop: epochs, steps, evaluation, saving. Sees contracts only: no tensor, no launcher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.data.naming import Naming
from hvdtrain.data.types import Batch
from hvdtrain.errors import HvdtrainError
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate
from hvdtrain.learner.steps import groups
from hvdtrain.report.json_lines import as_line
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import name_scores
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import minimized_in, with_totals
from hvdtrain.training.agreement import agree_on_batches, check_trained
from hvdtrain.training.callbacks import NO_CALLBACKS, Callbacks, Training, pruned_before
from hvdtrain.training.control import Control, StopNow, stopped_by
from hvdtrain.training.epoch import EpochClock, TrainingEpoch, epoch_report, log_epoch, log_training, plan_epoch
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.evaluation_within import EvaluationWithin, follow_scores
from hvdtrain.training.limits import Rates, TrainingLimits, skipped_error
from hvdtrain.training.notifier import LONG, Notifier
from hvdtrain.training.phase import EvaluatedModel, Phase
from hvdtrain.training.saving import Saving, await_checkpoint
from hvdtrain.training.session import Session, StepRecorder
from hvdtrain.training.step_log import StepLog, StepReport
from hvdtrain.training.step_numbers import StepNumbers
from hvdtrain.training.train_scores import TrainScores, check_elements, note_missing_parts, warn_of_means
from hvdtrain.training.vote import vote_interval


class Engine:
    """Trains epoch after epoch. All ranks run it in lockstep.

    Args:
        session: train is the first of its datasets; the others are evaluated after every epoch. Its progress is kept up to date.
        rates: the learning rates of epochs and steps.
        limits: when training ends, and how often it saves and evaluates.
        reporters: receive the reports of finished epochs and the records of steps.
        step_log: logs the progress within an epoch.
        recorders: called before every step.
        callbacks: those of the config, of this rank.
    """

    def __init__(
        self,
        session: Session,
        rates: Rates,
        limits: TrainingLimits,
        reporters: Reporters,
        step_log: StepLog,
        recorders: Sequence[StepRecorder] = (),
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> None:
        self._session = session
        self._comm = comm = session.comm
        self._learner = learner = session.learner
        self._timer = session.timer
        self._progress = session.progress
        self._train, *self._evaluations = session.feeds
        self._rates = rates
        self._limits = limits
        self._reporters = reporters
        self._step_log = step_log
        self._recorders = recorders
        self._callbacks = callbacks
        self._evaluate_feed = partial(evaluate, comm, learner, session.watchdog, step_log=step_log)
        self._phase = Phase(session.progress)
        self._evaluated = evaluated = EvaluatedModel(learner.state, session.reducer.sync)
        self._training = Training(session, self._phase, evaluated)  # what the callbacks see
        self._training.pruned = pruned_before(limits.end_after_epoch(session.progress))
        has_services = bool(reporters.services)
        self._notifier = Notifier(comm, session.watchdog, callbacks, self._training, evaluated, has_services)
        # Whether what is trained is not what train_step chose last: this rank had no batch, or an evaluation changed it.
        self._is_trained_stale = False
        # Their state before an evaluation that a resumed training repeats; None: it would repeat none.
        self._callbacks_before: dict[str, Any] | None = None
        self._clock = clock = EpochClock(session.timer, learner.meter, session.reducer)
        self._step_numbers = StepNumbers(reporters.steps, session.timer, learner.meter, clock) if reporters.steps else None
        self._within = EvaluationWithin(session, self._training, step_log, clock, reporters.evaluations)
        self._scores = TrainScores(comm, learner, limits.finite, session.reducer.gradients.keeps_ranks_alike)
        self._saving = Saving(session, self._scores, clock, self._training, self._notifier)
        interval = vote_interval(session.reducer, session.interrupt.grace)
        self._control = Control(session, limits, self._training, self._scores, bool(self._evaluations), interval)

    def run(self) -> Exception | None:
        """Train up to the last epoch. Returns what a callback of this rank raised to end it as pruned.

        Raises:
            Stopped: on all ranks after the same step, with a checkpoint.
            TrainingError: a loss is not a finite number.
            ConfigError: the config names a score that the epoch does not have; a checkpoint was written.
        """
        self._notifier.subscribe()
        self._callbacks.load(self._progress.callbacks)
        self._notifier.notify("on_train_begin")
        end = None
        while end is None and self._progress.epoch < self._limits.num_epochs:
            try:
                self._run_epoch(self._progress.epoch + 1)
            except StopNow as stop:  # the data is closed, and each rank has its own trained model
                raise self._stop(stop.status) from None
            end = self._limits.end_after_epoch(self._progress)
        self._await_background()
        self._training.stopped_by = end
        self._notifier.notify("on_stop")
        log.info(f"Finished training in epoch {self._progress.epoch}{f': {end}' if end else ''}.")
        return self._training.pruned

    def _run_epoch(self, number: int) -> None:
        """Collective. Train, evaluate, save and report one epoch, or what is left of it after a stop."""
        epoch = self._begin_epoch(number)
        current = epoch.current
        if not current.trained:
            self._train_epoch(epoch)
        if number == 1:
            check_elements(current.scores)
            warn_of_means(current.scores.counts(), current.position, self._train.sequences_among(epoch.plan.order))
            note_missing_parts(self._train, current.scores.counts())
        loss_scales = current.scores.scales() or dict(minimized_in(self._progress.history))
        scores = self._score_epoch(current, loss_scales)
        self._end_epoch(epoch, scores, loss_scales)

    def _begin_epoch(self, number: int) -> TrainingEpoch:
        """Collective. Plan an epoch, and prepare callbacks and the learner for it."""
        progress = self._progress
        self._clock.begin()
        current = progress.current = progress.current or EpochProgress(number, progress.step)
        self._train, *self._evaluations = self._session.epochs.feeds(self._session.feeds, number)
        epoch = plan_epoch(self._session, self._train, self._rates, current)
        self._training.learning_rate = epoch.first_rate
        self._notifier.notify("on_epoch_begin")
        self._learner.begin_epoch(number, progress.step)
        return epoch

    def _score_epoch(self, current: EpochProgress, loss_scales: Mapping[str, float]) -> dict[str, float]:
        """Collective. The scores of training, of the other datasets, and those that callbacks add at the epoch's end."""
        trained_before = self._check_trained()  # before the model of this epoch is saved
        train_scores = name_scores("train", self._learner.scoring.compute(self._comm, current.scores, "train"))
        scores = with_totals(self._evaluate(current, train_scores), loss_scales)
        self._is_trained_stale = self._is_trained_stale or (self._comm.size > 1 and trained_before != self._learner.trained_now())
        self._training.scores = scores
        if self._notifier.may_take_long("on_epoch_end") and self._control.is_save_worthwhile(LONG):
            self._save()  # before the callback, as the watchdog may end one that takes very long
        scores = {**scores, **name_scores("train", self._notifier.notify_of_scores("on_epoch_end"))}
        self._training.scores = scores
        self._note_early_end()
        return scores

    def _end_epoch(self, epoch: TrainingEpoch, scores: dict[str, float], loss_scales: dict[str, float]) -> None:
        """Collective. Enter an epoch into the history, save the model, and report.

        The order matters: the checkpoint has the epoch's record, the report has the time of saving, and a mistake that the scores
        show ends the training only after both, so that nothing is lost.
        """
        progress = self._progress
        number = epoch.current.epoch
        report = epoch_report(epoch, self._train, self._session, scores, loss_scales, *self._gather_times())
        states = {"is_updated": report.is_updated, "is_diverged": bool(report.diverged)}
        progress.finish_epoch(EpochRecord(number, epoch.learning_rate, scores, loss_scales, **states), as_line(report))
        self._callbacks_before = None
        mistake = self._limits.mistake(progress.history) or skipped_error(progress.history)
        log_training(report)
        is_last = number >= self._limits.num_epochs or self._limits.end_after_epoch(progress) is not None
        if mistake is not None or self._control.is_save_due_after_epoch(number, is_last):
            self._save(is_end=is_last)
        report = replace(report, seconds=self._gather_times()[0], goodput=self._session.goodput.entries())  # now with saving
        log_epoch(report, [feed.name for feed in self._evaluations], progress.history, epoch.current.initial)
        self._reporters.epoch(report)
        with self._notifier.reporting(number):
            if (pruned := self._reporters.serve(report)) is not None:
                self._training.prune(pruned)
        if self._note_early_end():
            self._save(is_end=True)
        if mistake is not None:
            self._await_background()
            raise mistake

    def _train_epoch(self, epoch: TrainingEpoch) -> None:
        """Collective. Run the remaining steps of an epoch. Afterwards its progress holds the scores of all ranks."""
        current = epoch.current
        progress = self._progress
        sync = self._session.reducer.sync
        rank_batches = self._train.rank_batches(epoch.plan, current.position)
        self._check_trained()  # on_epoch_begin may have changed it
        counts = agree_on_batches(self._comm, self._train, epoch.plan, len(rank_batches), current, progress.file)
        self._begin_steps(epoch, counts.most)
        with self._train.read(rank_batches, current.epoch, self._learner.staging) as batches:
            for steps in groups(counts.most, partial(self._steps_per_update, epoch)):
                if current.is_evaluation_due:  # since the last update, also if that was before a stop
                    self._evaluate_within(epoch)
                if current.ended_by:
                    break
                planned = counts.with_batch(steps[0])  # a rank with any batch has one in the first step
                self._session.reducer.gradients.begin_update(planned)
                epochs_done = epoch.continuous  # at its first step: the rate does not depend on the later ones
                has_batch = False
                for step in steps:
                    batch = self._next_batch(batches, current)
                    has_batch = has_batch or batch is not None
                    with self._timer.span("compute"), Naming(batch, self._train):
                        if batch is None:
                            self._notifier.notify_idle_step()
                        self._learner.backward(batch, completes_update=step == steps[-1])
                        if step == steps[-1]:
                            self._update(epoch, epochs_done)
                    progress.step += 1
                    self._is_trained_stale = batch is None
                    # With random_seed_offset, every rank goes through all data and has a separate position.
                    current.position += counts.ranks_in(step) if self._train.distribution == "shard" else 1
                    self._training.is_last_step = step == counts.most - 1
                    self._end_step(epoch, batch)
                # The plan does not know of batches that skip_broken leaves out.
                had_batch = has_batch if self._train.broken.limit else None
                sync.after_update(self._learner.state, FinishedUpdate(planned, progress.step, current.rates.last, had_batch))
                self._act_on_decision(current)
        sync.end_of_epoch(self._learner.state)
        self._scores.gather(current)
        self._step_log.finish()
        self._clock.count(current)
        current.trained = True

    def _check_trained(self) -> Mapping[str, str]:
        """Collective. Compare what the ranks train; returns it. Raises: ConfigError."""
        if self._comm.size == 1:
            return {}
        trained = self._learner.trained_now()
        check_trained(self._comm, None if self._is_trained_stale else trained)
        return trained

    def _begin_steps(self, epoch: TrainingEpoch, steps: int) -> None:
        """Begin the training of an epoch, or resume it with its last `steps` steps."""
        current = epoch.current
        step = self._progress.step
        listener = None
        if self._step_numbers is not None:
            self._step_numbers.begin(epoch, self._train)
            listener = self._step_numbers.step
        self._step_log.begin(current.epoch, None, steps, self._clock.elapsed(current), listener)
        done = step - current.first_step
        updates = -(-(done + steps) // self._steps_per_update(epoch))
        start = EpochStart(current.epoch, step, updates, epoch.first_rate, is_resumed=done > 0)
        self._session.reducer.sync.begin_epoch(self._learner.state, start)
        self._scores.begin(self._train, epoch.plan, current.position)

    def _steps_per_update(self, epoch: TrainingEpoch) -> int:
        """The number of steps whose gradients the next update sums."""
        return self._limits.steps_per_update(epoch.current.epoch, epoch.continuous, self._progress.step)

    def _next_batch(self, batches: Iterator[Batch], current: EpochProgress) -> Batch | None:
        """This rank's next batch; None: it has none left."""
        self._session.watchdog.beat(self._phase, "steps")
        with self._timer.span("data wait"):
            batch = next(batches, None)
        if batch is None:
            return None
        self._scores.add(batch)
        for record in self._recorders:
            record(current.epoch, self._progress.step, batch.indices)
        return batch.if_any

    def _update(self, epoch: TrainingEpoch, epochs_done: float) -> None:
        """Update the parameters. `epochs_done`: the number of epochs done before the first step of the update."""
        rate = self._rates.step_rate(self._progress.step, epochs_done, epoch.learning_rate)
        self._learner.update(rate)
        self._training.learning_rate = rate
        epoch.current.rates.add(rate)

    def _end_step(self, epoch: TrainingEpoch, batch: Batch | None) -> None:
        """Log a step, and call the callbacks."""
        current = epoch.current
        rate = current.rates.last if current.rates.updates else None
        number = self._progress.step - current.first_step
        self._step_log.step(StepReport(number, epoch.share, rate, batch, self._scores.buffer))
        self._notifier.notify_step_end()

    def _evaluate_within(self, epoch: TrainingEpoch) -> None:
        """Collective. Evaluate between two steps of an epoch, and do what follows from the scores."""
        current = epoch.current
        self._scores.gather(current)
        self._clock.count(current)
        loss_scales = current.scores.scales()
        with self._within.apart(), self._evaluated.use():
            scores = with_totals(self._evaluate(current, {}), loss_scales)
        saved = self._within.report(epoch, scores, loss_scales, [feed.name for feed in self._evaluations])
        if saved is not None:
            self._training.checkpoint = saved.model_file
            self._notifier.notify("on_save")
        follow_scores(self._rates, self._limits, epoch, self._progress)
        if self._control.save.is_due(self._progress.step):
            self._save()

    def _evaluate(self, current: EpochProgress, scores: dict[str, float]) -> dict[str, float]:
        """Collective. The scores of training, and those of the other datasets."""
        self._training.scores = scores
        self._callbacks_before = self._callbacks.state()  # a training that is stopped from here on repeats the evaluation
        for feed in self._evaluations:
            with self._timer.span("evaluation"), self._evaluated.use(), self._phase.evaluating(feed.name):
                self._notifier.notify_of_evaluation()
                means = self._evaluate_feed(feed, current.epoch, after_step=partial(self._act_on_decision, current))
                scores = {**scores, **name_scores(feed.name, means)}
                self._training.scores = scores
                scores = {**scores, **name_scores(feed.name, self._notifier.notify_of_scores("on_evaluation_end"))}
                self._training.scores = scores
        self._evaluated.forget_changes()
        self._control.evaluated(self._progress.step)
        if not current.trained:
            self._callbacks_before = None
        return scores

    def _gather_times(self) -> tuple[list[Mapping[str, float]], list[float]]:
        """Collective. By rank, the seconds of the epoch since it began or was resumed, and the share of computing in those of its
        training."""
        gathered = self._comm.gather((self._clock.seconds(), self._clock.computing), name="seconds")
        return [seconds for seconds, _ in gathered], [computing for _, computing in gathered if computing is not None]

    def _act_on_decision(self, current: EpochProgress) -> None:
        """Collective. Called after every update and every step of an evaluation: save, stop or fail if a rank requests it, and
        note that an evaluation is due."""
        phase = self._phase
        decision = self._control.poll(self._phase)
        if decision.not_finite:
            raise self._scores.not_finite_error(current)
        if decision.compare:
            self._saving.compare_weights()
        if phase.dataset is None:
            current.is_evaluation_due = decision.evaluate
        if decision.stop is not None:
            if phase.dataset is not None:
                self._learner.meter.take_scores()  # those of the evaluation, which is repeated
            raise StopNow(decision.stop)
        if decision.save and not phase.is_within_epoch:  # else at the evaluation's end: the model is now that which is evaluated
            self._save()

    def _stop(self, status: int) -> HvdtrainError:
        """Collective. End with a checkpoint. Returns the error to raise."""
        reason = self._control.stop_reason()
        self._save(is_end=True)
        self._await_background()
        self._training.stopped_by = reason
        self._notifier.notify("on_stop")
        return stopped_by(reason, self._progress, status)

    def _save(self, is_end: bool = False) -> None:
        """Collective. Write a checkpoint; once more if a callback ends training in `on_save`, so that the last one says so.

        Args:
            is_end: whether the training ends with it.
        """
        self._note_early_end()
        callbacks = self._callbacks_before
        self._progress.callbacks = self._callbacks.state() if callbacks is None else callbacks  # a checkpoint has those of rank 0
        state = self._learner.state
        # An evaluation may be under way: the checkpoint has the weights that are trained, not those that are evaluated.
        with self._phase.evaluating(None), self._evaluated.without_changes(), state.trained_weights():
            self._saving.save([self._train, *self._evaluations], is_end)
            self._control.save.done(self._progress.step)
        if self._note_early_end():
            self._save(is_end or self._progress.current is None)

    def _note_early_end(self) -> bool:
        """Collective. Note in the progress if a callback or a service of some rank ends training after this epoch.

        Returns:
            Whether this is new, so that a checkpoint has to be written with it.
        """
        if not self._notifier.may_finish:
            return False
        reasons = self._comm.gather(self._training.wants_finish, name="finish")
        reason = next((reason for reason in reasons if reason is not None), None)
        before = self._progress.finished
        if reason is not None:
            self._progress.finished = reason, self._limits.num_epochs
        return self._progress.finished != before

    def _await_background(self) -> None:
        """Collective. Wait for the last exchange of requests, and for checkpoints that are written in the background."""
        self._control.finish()
        await_checkpoint(self._session)
