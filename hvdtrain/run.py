"""The walk from settings to a trained model."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hvdtrain.checkpoint.folder import CheckpointFolder, parse_rule
from hvdtrain.checkpoint.preload import Preload, parse_preloads, take_over
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.checkpoint.saver import Saver, Saves
from hvdtrain.checkpoint.start import StartKeys, start_of_training
from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.data.describe import batch_lines, feed_lines
from hvdtrain.data.feed import Feed
from hvdtrain.engine import Engine, Pace, Rates
from hvdtrain.learner.accumulation import rounds_per_update
from hvdtrain.learner.base import Learner, as_function
from hvdtrain.learner.frameworks import FRAMEWORKS, BuildOptions
from hvdtrain.learner.reduce import scale_learning_rate
from hvdtrain.learner.reducer import Reducer
from hvdtrain.report.epoch import Reporter
from hvdtrain.report.json_lines import JsonLines
from hvdtrain.report.runs import Start, note_start
from hvdtrain.report.trackers import TensorBoard, Tracker
from hvdtrain.runtime.interrupt import Interrupt
from hvdtrain.runtime.log import open_log, say
from hvdtrain.runtime.timer import Timer
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.schedule.early_stopping import ends_early
from hvdtrain.schedule.file import LearningRateFile, read_learning_rate_file
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.rates import epoch_learning_rate
from hvdtrain.session import copy_data, open_communicator, open_feeds, threads
from hvdtrain.settings import Settings, effective
from hvdtrain.training.step_log import StepLog, open_step_log
from hvdtrain.training.trace import Note, Trace, TraceKeys, no_trace, num_runs
from hvdtrain.version import __version__


def train(settings: Settings) -> None:
    """Train as the config says, from the last finished epoch on. Raises: HvdtrainError."""
    with open_communicator(settings) as comm:
        train_with(comm, settings)


def train_with(comm: Communicator, settings: Settings) -> Learner:
    """Collective. Train on ranks that are connected already; return what was trained. Raises: HvdtrainError."""
    with (
        Interrupt(settings.interrupt.seconds) as interrupt,
        prepared(comm, settings, interrupt) as training,
        open_step_log(settings.log, comm.rank) as step_log,
    ):
        record_start(settings, comm, training.learner, training.progress)
        if not is_done(training.progress, training.pace):
            trace = open_trace(comm, settings.trace, training.progress)
            reporters = open_reporters(comm, settings, training)
            open_engine(settings, training, reporters, step_log, trace).run()
    return training.learner


@dataclass(frozen=True)
class Training:
    """What a training consists of, on every rank: built, loaded, and about to begin.

    Attributes:
        feeds: the datasets, train first.
    """

    comm: Communicator
    learner: Learner
    reducer: Reducer
    feeds: list[Feed]
    saver: Saves
    timer: Timer
    watchdog: Watchdog
    interrupt: Interrupt
    progress: Progress
    pace: Pace


@contextmanager
def prepared(comm: Communicator, settings: Settings, interrupt: Interrupt) -> Iterator[Training]:
    """Collective. Open the data, build the model, load what training starts from, and tell about it. Raises: HvdtrainError."""
    together(comm, lambda: open_log(settings.log, comm.rank, comm.size), name="open_log")
    timer = Timer()
    with Watchdog(settings.run.watchdog_timeout, comm.rank) as watchdog, ExitStack() as stack:
        if (callback := as_function(settings.run.startup_callback, "startup_callback")) is not None:
            watchdog.beat("startup_callback")
            callback()
        copies = copy_data(settings, comm, watchdog, stack)
        watchdog.beat("opening the datasets")
        feeds = together(comm, lambda: open_feeds(settings, comm, copies.places), name="open_feeds")
        watchdog.beat("building the model")
        reducer = settings.reduce.reducer(comm, timer)
        learner = together(comm, lambda: build_learner(settings, reducer, comm), name="build_learner")
        watchdog.beat("loading and sharing the weights")
        checkpoints = CheckpointFolder(Path(settings.run.model), FRAMEWORKS[settings.run.backend].suffix)
        saver = Saver(
            comm,
            learner.state,
            reducer,
            checkpoints,
            feeds[0].distribution,
            cleanup=parse_rule(settings.saving.cleanup_old_models),
            background=ThreadPoolExecutor(1, "saving") if settings.saving.save_in_background else None,
        )
        progress = resume(comm, saver, checkpoints, settings.start, settings.schedule.learning_rate_file)
        pace = open_pace(settings)
        announce(settings, comm, learner, reducer, feeds, progress, pace)
        yield Training(comm, learner, reducer, feeds, saver, timer, watchdog, interrupt, progress, pace)
        for feed in feeds:
            feed.dataset.close()


def open_engine(settings: Settings, training: Training, reporters: list[Reporter], step_log: StepLog, trace: Note) -> Engine:
    """The loop over epochs and steps."""
    return Engine(
        training.comm,
        training.learner,
        training.reducer,
        training.feeds[0],
        training.feeds[1:],
        open_rates(settings, training.comm.size),
        training.saver,
        reporters,
        training.timer,
        training.watchdog,
        training.interrupt,
        progress=training.progress,
        pace=training.pace,
        step_log=step_log,
        trace=trace,
    )


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


def open_trace(comm: Communicator, keys: TraceKeys, progress: Progress) -> Note:
    """Collective. Where to write down what is trained on."""
    if keys.trace_sequences is None:
        return no_trace
    prefix = Path(keys.trace_sequences)
    run = on_rank_zero(comm, lambda: num_runs(prefix), name="trace")
    return Trace(prefix, run, comm.rank, progress.step)


def open_reporters(comm: Communicator, settings: Settings, training: Training) -> list[Reporter]:
    """Collective. Whom rank 0 tells of finished epochs. Raises: ConfigError."""
    progress = training.progress

    def of_rank_zero() -> list[Reporter]:
        lines = JsonLines(Path(settings.run.model).parent / "scores.jsonl")
        lines.go_on(progress.epoch, progress.report)
        reporters: list[Reporter] = [lines]
        if settings.schedule.learning_rate_file is not None:
            reporters.append(LearningRateFile(Path(settings.schedule.learning_rate_file), progress.history))
        return reporters + open_trackers(settings, training)

    return together(comm, lambda: of_rank_zero() if comm.rank == 0 else [], name="open_reporters")


def open_trackers(settings: Settings, training: Training) -> list[Reporter]:
    """Who keeps track of experiments. Raises: ConfigError."""
    trackers: list[Reporter] = []
    if settings.trackers.use_tensorboard:
        parameters = training.learner.state.named_parameters if settings.trackers.tensorboard_histograms else None
        trackers.append(TensorBoard(Path(settings.run.model).parent / "tensorboard", training.progress.step, parameters))
    track_epoch = as_function(settings.trackers.track_epoch, "track_epoch")
    if track_epoch is not None:
        trackers.append(Tracker(track_epoch))
    return trackers


def build_learner(settings: Settings, reducer: Reducer, comm: Communicator) -> Learner:
    """The model and the optimizer, in the config's framework. Raises: ConfigError."""
    constant = constants(settings.start)
    is_sharded = settings.torch_distributed is not None and settings.torch_distributed.sharded
    options = BuildOptions(
        rank=comm.rank,
        local_rank=comm.local_rank,
        threads=threads(settings, comm.local_size),
        seed=settings.run.random_seed,
        precision=settings.precision.precision(),
        batch_norm=comm.channel("sync_batch_norm") if settings.learner.sync_batch_norm and comm.size > 1 else None,
        sharded=comm if is_sharded and comm.size > 1 else None,
        constants=partial(take_over, constant) if constant else None,
    )
    return FRAMEWORKS[settings.run.backend].build(settings.learner, reducer, options)


def constants(keys: StartKeys) -> list[Preload]:
    """The entries of preload_from_files whose parameters are neither trained nor saved, and who may lack which."""
    preloads = parse_preloads(keys.preload_from_files)
    always = [one for one in preloads if one.is_constant]
    for one in always:
        say(3, f"preload_from_files.{one.name}: what {one.filename} has is neither trained nor saved.")
    return always + [one for one in preloads if one.filename is None and not one.is_constant] if always else []


def resume(
    comm: Communicator, saver: Saver, checkpoints: CheckpointFolder, keys: StartKeys, learning_rate_file: str | None
) -> Progress:
    """Collective. Load what training starts from, and make the model the same on all ranks.

    Args:
        learning_rate_file: where the scores of the epochs are that a model was trained for elsewhere, if it has none itself.

    Raises:
        CheckpointError: what was asked for is not there, or a rank cannot read it.
        DataError: the learning rate file is none.
    """
    start = on_rank_zero(comm, lambda: start_of_training(keys, checkpoints), name="start")
    if start.remark is not None:
        say(2, start.remark)
    progress = Progress()
    if start.checkpoint is not None:
        progress = saver.load(start.checkpoint)
        say(3, f"Loaded {start.checkpoint.model_file}: training goes on {where(progress)}.")
    elif start.model_file is not None:
        progress = saver.load_model(start.model_file, start.epoch)
        say(3, f"Loaded {start.model_file}: training goes on {where(progress)}.")
    if progress.epoch and not progress.history and learning_rate_file is not None:
        path = Path(learning_rate_file)
        records = on_rank_zero(comm, lambda: read_learning_rate_file(path) if path.exists() else [], name="learning_rate_file")
        progress.history = [record for record in records if record.epoch <= progress.epoch]
    fresh = start.checkpoint is None
    saver.preload([one for one in parse_preloads(keys.preload_from_files) if one.is_due(training=True, fresh=fresh)])
    if fresh:
        saver.share()
    return progress


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


def announce(
    settings: Settings,
    comm: Communicator,
    learner: Learner,
    reducer: Reducer,
    feeds: list[Feed],
    progress: Progress,
    pace: Pace,
) -> None:
    """Collective. Say what is about to happen: ranks, data, batches, the rule for the learning rate. Raises: DataError."""
    started = launch.launch()
    hosts = _hosts(comm, learner)
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
        say(4, f"ranks: {reducer.describe()}")
        if settings.reduce.horovod_scale_lr:
            factor = scale_learning_rate(1.0, settings.reduce.horovod_scale_lr, comm.size)
            say(4, f"horovod_scale_lr: every learning rate is multiplied by {factor:.6g} for {comm.size} ranks")
        if settings.reduce.horovod_dataset_distribution == "random_seed_offset":
            say(4, f"every rank goes through all data in its own order: an epoch is {comm.size} passes")
    if is_done(progress, pace):
        early = pace.ends_early(progress.history)
        say(3, f"Already trained until final epoch {progress.epoch}, nothing to do{f': {early}' if early else ''}.")


def record_start(settings: Settings, comm: Communicator, learner: Learner, progress: Progress) -> None:
    """Collective. Write down what a training is started with. Raises: ConfigError, if it cannot be written."""
    in_effect = {key.name: (key.value, key.origin) for key in effective(settings)}
    start = Start(_hosts(comm, learner), in_effect, progress.epoch + 1, learner.num_parameters)
    on_rank_zero(comm, lambda: note_start(Path(settings.run.model).parent, start), name="note_start")


def _hosts(comm: Communicator, learner: Learner) -> list[tuple[str, str]]:
    """Collective. By rank, its host and device."""
    return comm.gather((socket.gethostname(), learner.device_name), name="hosts")


def where(progress: Progress) -> str:
    """Where training stands, in words."""
    within = progress.within
    if within is None:
        return f"after epoch {progress.epoch}, step {progress.step}"
    if within.trained:
        return f"with the evaluation of epoch {within.epoch}"
    return f"in epoch {within.epoch}, after its step {progress.step - within.first_step}"


def is_done(progress: Progress, pace: Pace) -> bool:
    """Whether there is nothing left to train."""
    if progress.within is not None:
        return progress.within.epoch > pace.num_epochs
    return progress.epoch >= pace.num_epochs or pace.ends_early(progress.history) is not None
