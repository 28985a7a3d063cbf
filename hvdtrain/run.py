"""The walk from settings to a trained model."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.checkpoint.folder import parse_rule
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.comm.horovod import HorovodCommunicator
from hvdtrain.comm.horovod_gloo import is_elastic, stop_for_other_hosts
from hvdtrain.comm.local import restarts_of_torchrun
from hvdtrain.config.source import as_function
from hvdtrain.data.feed import Feed, batch_lines, feed_lines
from hvdtrain.data.plan.bounds import rearranged
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.engine import Engine, Rates, TrainingLimits
from hvdtrain.errors import ConfigError, DataError, HvdtrainError, Problem
from hvdtrain.learner.base import Learner
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.learner.precision import cpu_lacks_bfloat16
from hvdtrain.learner.reducers import scale_learning_rate
from hvdtrain.learner.steps import rounds_per_update
from hvdtrain.report.epoch import EpochReport, Reporter
from hvdtrain.report.json_lines import JsonLines, StepLines, as_json, table, write_summary
from hvdtrain.report.runs import Start, note_start
from hvdtrain.report.services import RunDescription, Status, config_values, git_state
from hvdtrain.report.steps import Reporters
from hvdtrain.report.trackers import PATIENCE, InBackground, RunIds, TensorBoard, Tolerant, TrackEpoch, report_page
from hvdtrain.runtime import log
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.schedule.early_stopping import ends_early
from hvdtrain.schedule.file import LearningRateFile, epoch_meta, epoch_rate
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import as_errors, fallback_line, missing_scores, unclear_line, wrong_directions
from hvdtrain.schedule.rates import epoch_learning_rate
from hvdtrain.session import Session, checkpoint_folder, open_session
from hvdtrain.settings import Settings, effective
from hvdtrain.training.agreement import plan_together
from hvdtrain.training.step_log import open_step_log
from hvdtrain.training.trace import OfRank, Profile, StepRecorder, Trace, TraceKeys, num_runs, record_nothing
from hvdtrain.version import __version__


@dataclass(frozen=True)
class Trained:
    """What a training leaves, on every rank.

    Attributes:
        history: of all finished epochs, also of those that an earlier start trained.
        best: what best.json says (`checkpoint/progress.py`); None: no epoch has a score.
        checkpoint: the file with the last epoch's model.
        num_epochs: how many of the epochs this start has finished.
    """

    learner: Learner
    history: Sequence[EpochRecord]
    best: Mapping[str, Any] | None
    checkpoint: Path
    num_epochs: int


def train(settings: Settings, comm: Communicator | None = None) -> Trained:
    """Train as the config says, from the newest checkpoint on.

    Args:
        comm: ranks that are connected already; None: connect them as the config says.

    Raises:
        HvdtrainError: a mistake in the config, the data or a checkpoint, or training was stopped.
    """
    if settings.run.overfit_batches is not None:
        settings = in_folder_of_its_own(settings)
    with (
        open_session(settings, "train", comm) as session,
        open_step_log(settings.log, session.comm.rank, settings.process) as step_log,
    ):
        if settings.run.overfit_batches is not None:
            session = overfitting(session, settings.run.overfit_batches)
        limits = replace(open_limits(settings), mistake=partial(wrong_scores, settings))
        before = session.progress.epoch
        hosts = gather_hosts(session)
        announce(settings, session, limits, hosts)
        refuse_wrong_directions(settings, session.progress.history)
        start = record_start(settings, session, hosts)
        on_rank_zero(session.comm, lambda: session.best.note(session.progress.history), name="best")
        if is_elastic(launch.environment()) and session.comm.rank == 0:
            stop_for_other_hosts(launch.environment())
        if not is_done(session.progress, limits):
            rates = open_rates(settings, session.comm.size)
            reporters = open_reporters(settings, session)
            callbacks = together(session.comm, lambda: settings.callbacks.open(session.comm.rank), name="callbacks")
            with (
                noting_changed_files(session.feeds),
                tracking(settings, session, start) as trackers,
                profiled(settings, session, open_trace(session, settings.trace)) as trace,
            ):
                Engine(session, rates, limits, reporters.and_(trackers), step_log, trace, callbacks).run()
        progress = session.progress
        checkpoint = checkpoint_folder(settings).at(progress.epoch).model_file
        best = session.best.found(progress.history)
        return Trained(session.learner, list(progress.history), best, checkpoint, progress.epoch - before)


def in_folder_of_its_own(settings: Settings) -> Settings:
    """The settings of a training with `overfit_batches`: it starts anew, and leaves the files of other trainings alone."""
    prefix = Path(settings.run.model)
    return replace(
        settings,
        run=replace(settings.run, model=str(prefix.parent / "overfit" / prefix.name)),
        start=replace(settings.start, start_epoch=1),
        schedule=replace(settings.schedule, learning_rate_file=None),
    )


def overfitting(session: Session, number: int) -> Session:
    """Collective. The session with the first N batches of each rank, repeated for as many as an epoch has. Raises: DataError."""
    feed = session.feeds[0]
    if feed.dataset.has_fixed_order:
        raise DataError(
            f"overfit_batches: expected a dataset that can be read in any order, got {feed.name}, which RETURNN reads in its own "
            "(convert it once with hvdtrain dump and train on the HDF file)"
        )
    plan = plan_together(session.comm, feed, 1)
    size = session.comm.size if feed.distribution == "shard" else 1
    first = numpy.arange(min(number * size, plan.num_batches))
    repeated = Plan(*rearranged(plan.order, plan.bounds, numpy.resize(first, plan.num_batches)))
    log.info(f"overfit_batches: {len(first)} batches of {plan.num_batches}, again and again; files go to overfit/")
    return replace(session, feeds=[replace(feed, only=repeated), *session.feeds[1:]])


@contextmanager
def noting_changed_files(feeds: list[Feed]) -> Iterator[None]:
    """Add to a crash, such as a class beyond the model's last one, that another process has written to the data meanwhile."""
    try:
        yield
    except HvdtrainError:
        raise  # has a message of its own
    except Exception as error:
        for feed in feeds:
            try:
                if feed.files is not None:
                    feed.files.check()
            except DataError as changed:
                error.add_note(f"in the meantime, the data of {feed.name} was changed: {changed}")
        raise


def open_limits(settings: Settings) -> TrainingLimits:
    """When to save, to tell, and to end."""
    return TrainingLimits(
        num_epochs=settings.run.num_epochs,
        ends_early=lambda history: ends_early(settings.ending, history, settings.measure),
        save_epochs=settings.saving.save_interval,
        save_steps=settings.saving.save_interval_steps,
        save_minutes=settings.saving.save_interval_minutes,
        rounds_per_update=rounds_per_update(settings.accumulation),
        finite=settings.ending.stop_on_nonfinite_train_score,
    )


def refuse_wrong_directions(settings: Settings, history: list[EpochRecord]) -> None:
    """Raises: ConfigError, on all ranks, if keys take the worst of the finished epochs for the best one."""
    problems = wrong_directions_of(settings, history)
    if problems:
        error = ConfigError(problems)
        error.on_every_rank = True
        raise error


def wrong_directions_of(settings: Settings, history: list[EpochRecord]) -> list[Problem]:
    """Problems with keys that take the worst of the finished epochs for the best one."""
    rule = parse_rule(settings.saving.cleanup_old_models)
    keeps_best = rule is not None and rule.keep_best_n > 0
    return wrong_directions(history, measures_of(settings), keeps_best, settings.scoring.higher_is_better, settings.origins)


def measures_of(settings: Settings) -> dict[str, str | list[str] | None]:
    """The scores that keys name, by key."""
    return {
        "early_stopping_measure": settings.ending.early_stopping_measure,
        "learning_rate_control_error_measure": settings.newbob.learning_rate_control_error_measure,
    }


def wrong_scores(settings: Settings, history: list[EpochRecord], *, is_saved: bool = True) -> ConfigError | None:
    """The error of all ranks if keys name scores that no epoch has had, or take the worst epoch for the best one.

    The names of scores are known once an epoch was evaluated.

    Args:
        is_saved: whether training can go on after the last epoch with other keys.
    """
    problems = missing_scores(history, measures_of(settings), settings.scoring.higher_is_better, settings.origins)
    problems += wrong_directions_of(settings, history)
    if not problems:
        return None
    if is_saved:
        saved = f"(epoch {history[-1].epoch} is saved: with other keys, the same command goes on after it)"
        problems[-1] = Problem.of(problems[-1].rule, f"{problems[-1]} {saved}")
    error = ConfigError(problems)
    error.on_every_rank = True
    return error


def open_trace(session: Session, keys: TraceKeys) -> StepRecorder:
    """Collective. Where to write down which sequences each step trains on."""
    if keys.trace_sequences is None:
        return record_nothing
    prefix = Path(keys.trace_sequences)
    run = on_rank_zero(session.comm, lambda: num_runs(prefix), name="trace")
    return Trace(prefix, run, session.comm.rank, session.progress.step)


@contextmanager
def profiled(settings: Settings, session: Session, note: StepRecorder) -> Iterator[StepRecorder]:
    """Profile some steps, if the config asks for it."""
    number = settings.trace.profile_steps
    if number is None:
        yield note
        return
    comm, folder = session.comm, Path(settings.run.model).parent / "profile"
    on_gpu = session.learner.device_name != "CPU"
    profile = Profile(
        note,
        OfRank(FRAMEWORKS[settings.run.backend].profiler(on_gpu), comm.rank, comm.size),
        session.timer,
        folder / f"rank-{comm.rank}-of-{comm.size}.json.gz",
        number,
        partial(switch_timeline, comm, folder / "horovod.json") if settings.reduce.horovod_timeline is None else lambda _: None,
    )
    try:
        yield profile
    finally:
        profile.stop()


def switch_timeline(comm: Communicator, file: Path, on: bool) -> None:
    """Start Horovod's timeline, or stop it, if it is Horovod that connects the ranks."""
    if isinstance(comm, HorovodCommunicator) and comm.rank == 0:
        if on:
            comm.start_timeline(file)
        else:
            comm.stop_timeline()


def open_reporters(settings: Settings, session: Session) -> Reporters:
    """Collective. Where rank 0 reports finished epochs and steps. Raises: ConfigError."""
    comm, progress, folder = session.comm, session.progress, Path(settings.run.model).parent

    def of_rank_zero() -> Reporters:
        epochs, steps = JsonLines(folder / "scores.jsonl"), StepLines(folder / "steps.jsonl")
        epochs.go_on(progress.epoch, progress.report)
        current = progress.current
        steps.go_on(progress.epoch + 1, 0 if current is None else progress.step - current.first_step)
        reporters: list[Reporter] = [epochs, BestReporter(session)]
        if settings.schedule.learning_rate_file is not None:
            path = Path(settings.schedule.learning_rate_file)
            reporters.append(LearningRateFile(path, progress.history, epoch_meta, epoch_rate))
        trackers = open_trackers(settings, session)
        return Reporters(reporters, [steps.step, *trackers.steps], trackers.services)

    return together(comm, lambda: of_rank_zero() if comm.rank == 0 else Reporters(), name="open_reporters")


def open_trackers(settings: Settings, session: Session) -> Reporters:
    """The experiment trackers that the config asks for. Raises: ConfigError."""
    trackers: list[Reporter] = []
    boards: list[TensorBoard] = []
    if settings.trackers.use_tensorboard:
        parameters = session.learner.state.named_parameters if settings.trackers.tensorboard_histograms else None
        boards.append(TensorBoard(Path(settings.run.model).parent / "tensorboard", session.progress.step, parameters))
    track_epoch = as_function(settings.trackers.track_epoch, "track_epoch")
    if track_epoch is not None:
        trackers.append(Tolerant("track_epoch", TrackEpoch(track_epoch)))
    tolerant = [Tolerant("use_tensorboard", board) for board in boards]
    return Reporters(steps=[board.step for board in boards], services=[*tolerant, *trackers])


@contextmanager
def tracking(settings: Settings, session: Session, start: Start) -> Iterator[list[InBackground]]:
    """The experiment trackers of the config on rank 0, which begin here and end with the block; none on the other ranks."""
    made = settings.trackers.made if session.comm.rank == 0 else []
    if not made:
        yield []
        return
    folder, progress = Path(settings.run.model).absolute().parent, session.progress
    ids = RunIds(folder)
    known = ids.read() if progress.step else {}  # a training that begins anew is another run
    git = git_state(settings.files[0].absolute().parent if settings.files else folder)
    trackers = []
    for number, one in enumerate(made):
        label = one.label if number == [other.label for other in made].index(one.label) else f"{one.label} ({number})"
        trackers.append(InBackground(label, one.make, partial(ids.note, label)))
        config = config_values(start.settings)
        trackers[-1].begin(RunDescription(folder.name, folder, known.get(label), progress.step, config, git, start))
    status: Status = "failed"
    try:
        yield trackers
        status = "finished"
    except Stopped:
        status = "stopped"
        raise
    finally:
        session.watchdog.beat("waiting for the trackers", "unhurried")
        files = {} if status == "failed" else report_page(folder)
        for tracker in trackers:
            tracker.ask_to_end(status, files)
        deadline = time.monotonic() + PATIENCE[status]
        for tracker in trackers:
            tracker.wait(deadline - time.monotonic())


def open_rates(settings: Settings, size: int) -> Rates:
    """The learning rate of an epoch and of a step."""
    dynamic = as_function(settings.schedule.dynamic_learning_rate, "dynamic_learning_rate")
    schedule = settings.step_schedule

    def of_epoch(epoch: int, history: list[EpochRecord]) -> float:
        errors = as_errors(history, settings.scoring.higher_is_better)
        return epoch_learning_rate(settings.schedule, settings.newbob, epoch, errors)

    def of_step(step: int, epoch_continuous: float, epoch_rate: float) -> float:
        rate = epoch_rate
        if dynamic is not None:
            rate = float(
                dynamic(
                    global_train_step=step,
                    epoch=int(epoch_continuous) + 1,
                    epoch_continuous=epoch_continuous,
                    learning_rate=epoch_rate,
                )
            )
        elif schedule is not None:
            rate *= schedule.factor(step, epoch_continuous)
        return scale_learning_rate(rate, settings.reduce.learning_rate_scale, size)

    return Rates(of_epoch, of_step)


class BestReporter:
    """Logs which epoch is the best so far, and has best.json written after an epoch whose model is not saved, too."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_first = True

    def epoch(self, report: EpochReport) -> None:
        history, measure = self._session.progress.history, self._session.best.measure
        best, name = measure.best(history), measure.name(history)
        for line in (unclear_line(history, measure), fallback_line(history, measure)) if self._is_first else ():
            if line is not None:
                log.warning(line)
        if best is not None and name is not None and best.epoch == report.epoch:
            log.info(f"epoch {best.epoch} is the best so far: {name} {best.scores[name]:.4g}, {measure.direction(name)}")
        self._is_first = False
        self._session.best.note(history)


Host = tuple[str, str]
"""A rank's host and device."""


def gather_hosts(session: Session) -> list[Host]:
    """Collective. By rank, its host and device."""
    return session.comm.gather((socket.gethostname(), session.learner.device_name), name="hosts")


def announce(settings: Settings, session: Session, limits: TrainingLimits, hosts: list[Host]) -> None:
    """Collective. Log what is about to happen: ranks, data, batches, the rule for the learning rate. Raises: DataError."""
    comm, learner, feeds, progress = session.comm, session.learner, session.feeds, session.progress
    started = launch.launch()
    where = ", ".join(f"{hosts.count(host)} on {host[0]} ({host[1]})" for host in dict.fromkeys(hosts))
    log.detail(f"hvdtrain {__version__}, {settings.run.backend}: {comm.size} rank{'s' if comm.size > 1 else ''}, {where}")
    if settings.reduce.use_horovod and started.launcher is None:
        log.warning("use_horovod is set, but this process was started alone: it trains as one rank (for 2: mpirun -np 2 ...)")
    if settings.torch_distributed is not None and started.launcher is None and settings.launch.ngpu is None:
        log.warning(
            "torch_distributed is set, but this process was started alone: it trains as one rank (for 2: ++ngpu 2, or torchrun)",
        )
    if launch.is_bound() and launch.cores() == 1:
        log.warning("this rank is bound to a single core of several; mpirun --bind-to none lets it use more")
    if len({name for name, _ in hosts}) > 1 and launch.misses_lost_hosts(launch.environment()):
        log.warning(f"mpirun does not notice when a host is lost; with {launch.KEEPALIVE} it does")
    first = progress.epoch + 1

    def data_lines() -> list[tuple[int, str]]:
        lines = [line for feed in feeds for line in feed_lines(feed, comm.local_size)]
        return lines + batch_lines(feeds[0].batch_keys, first, comm.size)

    for level, line in together(comm, data_lines, name="data_lines"):
        log.write(level, line)
    dtype = settings.precision.precision().dtype
    log.detail(f"model: {learner.num_parameters} parameters{'' if dtype == 'float32' else f', computes in {dtype} where it can'}")
    if dtype == "bfloat16" and learner.device_name == "CPU" and cpu_lacks_bfloat16():
        log.warning(f"mixed_precision: this CPU has no instructions for {dtype} (avx512_bf16, amx_bf16): float32 is faster on it")
    if (several := settings.accumulation.accum_grad_multiple_step) not in (None, 1):
        many = f"{several}" if isinstance(several, int) else "as many as accum_grad_multiple_step says"
        log.detail(f"updates: each adds up the gradients of several batches of every rank: {many}")
    if comm.size > 1:
        log.detail(f"ranks: {session.reducer.description}")
        if told := settings.reduce.without_effect:
            log.warning(told)
        if settings.reduce.learning_rate_scale:
            factor = scale_learning_rate(1.0, settings.reduce.learning_rate_scale, comm.size)
            log.detail(f"horovod_scale_lr: every learning rate is multiplied by {factor:.6g} for {comm.size} ranks")
        if settings.reduce.dataset_distribution == "random_seed_offset":
            log.detail(f"every rank goes through all data in its own order: an epoch is {comm.size} passes")
    environ = launch.environment()
    may_restart = settings.launch.max_restarts or restarts_of_torchrun(environ) or is_elastic(environ)
    if may_restart and limits.save_steps is None and limits.save_minutes is None:
        log.info("a restart goes on from the last finished epoch that was saved; save_interval_minutes or _steps loses less")
    log.info(f"the best epoch is that of {settings.measure.describe(progress.history)}")
    if is_done(progress, limits):
        early = limits.ends_early(progress.history)
        # A program that varies keys, and not the folder, would take these for results of its keys.
        level = 3 if settings.process.is_own else 2
        log.write(level, f"Already trained until final epoch {progress.epoch}, nothing to do{f': {early}' if early else ''}.")


def record_start(settings: Settings, session: Session, hosts: list[Host]) -> Start:
    """Collective. Append what a training is started with to starts.jsonl, and write the model's layers to summary.json.

    Raises:
        ConfigError: it cannot be written.
    """
    in_effect = {key.name: (key.value, key.origin) for key in effective(settings)}
    start = Start(hosts, in_effect, session.progress.epoch + 1, session.learner.num_parameters, settings.texts)
    folder = Path(settings.run.model).parent

    def note() -> None:
        note_start(folder, start)
        summary = as_json(session.learner.layers(), {})
        write_summary(folder, summary)
        for line in table(summary):
            log.debug(line)

    on_rank_zero(session.comm, note, name="note_start")
    return start


def is_done(progress: Progress, limits: TrainingLimits) -> bool:
    """Whether there is nothing left to train."""
    if progress.current is not None:
        return progress.current.epoch > limits.num_epochs
    return progress.epoch >= limits.num_epochs or limits.ends_early(progress.history) is not None
