"""The walk from settings to a trained model."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.comm.horovod_gloo import is_elastic, stop_for_other_hosts
from hvdtrain.comm.local import restarts_of_torchrun
from hvdtrain.config.source import as_function
from hvdtrain.data.feed import Feed, batch_lines, feed_lines
from hvdtrain.engine import Engine, Pace, Rates
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.learner.base import Learner
from hvdtrain.learner.reduce import scale_learning_rate
from hvdtrain.learner.steps import rounds_per_update
from hvdtrain.report.epoch import Reporter
from hvdtrain.report.json_lines import JsonLines
from hvdtrain.report.runs import Start, note_start
from hvdtrain.report.trackers import TensorBoard, Tracker
from hvdtrain.runtime.log import say
from hvdtrain.schedule.early_stopping import ends_early
from hvdtrain.schedule.file import LearningRateFile, epoch_meta
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.rates import epoch_learning_rate
from hvdtrain.session import Session, open_session
from hvdtrain.settings import Settings, effective
from hvdtrain.training.step_log import open_step_log
from hvdtrain.training.trace import Note, Trace, TraceKeys, no_trace, num_runs
from hvdtrain.version import __version__


def train(settings: Settings, comm: Communicator | None = None) -> Learner:
    """Train as the config says, from the newest checkpoint on; return what was trained.

    Args:
        comm: ranks that are connected already; None: connect them as the config says.

    Raises:
        HvdtrainError: a mistake in the config, the data or a checkpoint, or training was stopped.
    """
    with open_session(settings, "train", comm) as session, open_step_log(settings.log, session.comm.rank) as step_log:
        pace = open_pace(settings)
        hosts = gather_hosts(session)
        announce(settings, session, pace, hosts)
        record_start(settings, session, hosts)
        if is_elastic(launch.environment()) and session.comm.rank == 0:
            stop_for_other_hosts(launch.environment())
        if not is_done(session.progress, pace):
            rates = open_rates(settings, session.comm.size)
            trace = open_trace(session, settings.trace)
            reporters = open_reporters(settings, session)
            with noting_changed_files(session.feeds):
                Engine(session, rates, pace, reporters, step_log, trace).run()
    return session.learner


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


def open_pace(settings: Settings) -> Pace:
    """When to save, to tell, and to end."""
    measure = settings.newbob.learning_rate_control_error_measure
    return Pace(
        num_epochs=settings.run.num_epochs,
        ends_early=lambda history: ends_early(settings.ending, history, measure),
        save_epochs=settings.saving.save_interval,
        save_steps=settings.saving.save_interval_steps,
        save_minutes=settings.saving.save_interval_minutes,
        rounds_per_update=rounds_per_update(settings.accumulation),
        finite=settings.ending.stop_on_nonfinite_train_score,
    )


def open_trace(session: Session, keys: TraceKeys) -> Note:
    """Collective. Where to write down which sequences each step trains on."""
    if keys.trace_sequences is None:
        return no_trace
    prefix = Path(keys.trace_sequences)
    run = on_rank_zero(session.comm, lambda: num_runs(prefix), name="trace")
    return Trace(prefix, run, session.comm.rank, session.progress.step)


def open_reporters(settings: Settings, session: Session) -> list[Reporter]:
    """Collective. Where rank 0 reports finished epochs. Raises: ConfigError."""
    comm, progress = session.comm, session.progress

    def of_rank_zero() -> list[Reporter]:
        lines = JsonLines(Path(settings.run.model).parent / "scores.jsonl")
        lines.go_on(progress.epoch, progress.report)
        reporters: list[Reporter] = [lines]
        if settings.schedule.learning_rate_file is not None:
            reporters.append(LearningRateFile(Path(settings.schedule.learning_rate_file), progress.history, epoch_meta))
        return reporters + open_trackers(settings, session)

    return together(comm, lambda: of_rank_zero() if comm.rank == 0 else [], name="open_reporters")


def open_trackers(settings: Settings, session: Session) -> list[Reporter]:
    """The experiment trackers that the config asks for. Raises: ConfigError."""
    trackers: list[Reporter] = []
    if settings.trackers.use_tensorboard:
        parameters = session.learner.state.named_parameters if settings.trackers.tensorboard_histograms else None
        trackers.append(TensorBoard(Path(settings.run.model).parent / "tensorboard", session.progress.step, parameters))
    track_epoch = as_function(settings.trackers.track_epoch, "track_epoch")
    if track_epoch is not None:
        trackers.append(Tracker(track_epoch))
    return trackers


def open_rates(settings: Settings, size: int) -> Rates:
    """The learning rate of an epoch and of a step."""
    dynamic = as_function(settings.schedule.dynamic_learning_rate, "dynamic_learning_rate")
    schedule = settings.step_schedule

    def of_epoch(epoch: int, history: list[EpochRecord]) -> float:
        return epoch_learning_rate(settings.schedule, settings.newbob, epoch, history)

    def of_step(step: int, epoch_continuous: float, epoch_rate: float) -> float:
        rate = epoch_rate
        if dynamic is not None:
            rate = dynamic(
                global_train_step=step,
                epoch=int(epoch_continuous) + 1,
                epoch_continuous=epoch_continuous,
                learning_rate=epoch_rate,
            )
        elif schedule is not None:
            rate *= schedule.factor(step, epoch_continuous)
        return scale_learning_rate(rate, settings.reduce.horovod_scale_lr, size)

    return Rates(of_epoch, of_step)


Host = tuple[str, str]
"""A rank's host and device."""


def gather_hosts(session: Session) -> list[Host]:
    """Collective. By rank, its host and device."""
    return session.comm.gather((socket.gethostname(), session.learner.device_name), name="hosts")


def announce(settings: Settings, session: Session, pace: Pace, hosts: list[Host]) -> None:
    """Collective. Log what is about to happen: ranks, data, batches, the rule for the learning rate. Raises: DataError."""
    comm, learner, feeds, progress = session.comm, session.learner, session.feeds, session.progress
    started = launch.launch()
    where = ", ".join(f"{hosts.count(host)} on {host[0]} ({host[1]})" for host in dict.fromkeys(hosts))
    say(4, f"hvdtrain {__version__}, {settings.run.backend}: {comm.size} rank{'s' if comm.size > 1 else ''}, {where}")
    if settings.reduce.use_horovod and started.launcher is None:
        say(2, "use_horovod is set, but this process was started alone: it trains as one rank (for 2: mpirun -np 2 ...)")
    if settings.torch_distributed is not None and started.launcher is None and settings.launch.ngpu is None:
        say(
            2,
            "torch_distributed is set, but this process was started alone: it trains as one rank (for 2: ++ngpu 2, or torchrun)",
        )
    if launch.is_bound() and launch.cores() == 1:
        say(2, "this rank is bound to a single core of several; mpirun --bind-to none lets it use more")
    if len({name for name, _ in hosts}) > 1 and launch.misses_lost_hosts(launch.environment()):
        say(2, f"mpirun does not notice when a host is lost; with {launch.KEEPALIVE} it does")
    first = progress.epoch + 1

    def data_lines() -> list[tuple[int, str]]:
        lines = [line for feed in feeds for line in feed_lines(feed, comm.local_size)]
        return lines + batch_lines(feeds[0].batch_keys, first, comm.size)

    for level, line in together(comm, data_lines, name="data_lines"):
        say(level, line)
    dtype = settings.precision.precision().dtype
    say(4, f"model: {learner.num_parameters} parameters{'' if dtype == 'float32' else f', computes in {dtype} where it can'}")
    if (several := settings.accumulation.accum_grad_multiple_step) not in (None, 1):
        many = f"{several}" if isinstance(several, int) else "as many as accum_grad_multiple_step says"
        say(4, f"updates: each adds up the gradients of several batches of every rank: {many}")
    if comm.size > 1:
        say(4, f"ranks: {session.reducer.describe()}")
        if settings.reduce.horovod_scale_lr:
            factor = scale_learning_rate(1.0, settings.reduce.horovod_scale_lr, comm.size)
            say(4, f"horovod_scale_lr: every learning rate is multiplied by {factor:.6g} for {comm.size} ranks")
        if settings.reduce.horovod_dataset_distribution == "random_seed_offset":
            say(4, f"every rank goes through all data in its own order: an epoch is {comm.size} passes")
    environ = launch.environment()
    may_restart = settings.launch.max_restarts or restarts_of_torchrun(environ) or is_elastic(environ)
    if may_restart and pace.save_steps is None and pace.save_minutes is None:
        say(3, "a restart goes on from the last finished epoch that was saved; save_interval_minutes or _steps loses less")
    if is_done(progress, pace):
        early = pace.ends_early(progress.history)
        say(3, f"Already trained until final epoch {progress.epoch}, nothing to do{f': {early}' if early else ''}.")


def record_start(settings: Settings, session: Session, hosts: list[Host]) -> None:
    """Collective. Append what a training is started with to starts.jsonl. Raises: ConfigError, if it cannot be written."""
    in_effect = {key.name: (key.value, key.origin) for key in effective(settings)}
    start = Start(hosts, in_effect, session.progress.epoch + 1, session.learner.num_parameters, settings.texts)
    on_rank_zero(session.comm, lambda: note_start(Path(settings.run.model).parent, start), name="note_start")


def is_done(progress: Progress, pace: Pace) -> bool:
    """Whether there is nothing left to train."""
    if progress.current is not None:
        return progress.current.epoch > pace.num_epochs
    return progress.epoch >= pace.num_epochs or pace.ends_early(progress.history) is not None
