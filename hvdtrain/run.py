"""The walk from settings to a trained model. The one place that knows every part."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path

from hvdtrain.checkpoint import CheckpointFolder
from hvdtrain.cleanup import parse_rule
from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.comm.current import connected
from hvdtrain.comm.patience import patiently
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.cache import Budget, host_memory
from hvdtrain.data.chunks import cut, keys_of
from hvdtrain.data.copies import Copies, CopyFolder, copy_files
from hvdtrain.data.describe import batch_lines, copy_lines, feed_lines
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan import BatchKeys
from hvdtrain.data.selection import listed
from hvdtrain.data.sizes import parse_size, parse_sizes, size_text
from hvdtrain.data.sources import DatasetSpec, Means, open_dataset
from hvdtrain.data.unchanged import Unchanged
from hvdtrain.effective import effective
from hvdtrain.ending import ends_early
from hvdtrain.engine import Engine, Pace, Rates
from hvdtrain.errors import DataError, HvdtrainError, LaunchError
from hvdtrain.interrupt import Interrupt
from hvdtrain.learner.base import Learner, as_function
from hvdtrain.log import open_log, say
from hvdtrain.preload import parse_preloads
from hvdtrain.reduce import GradReduce, ParamAverage, ReduceKeys, Reducer, scale_learning_rate
from hvdtrain.report.epoch import Reporter
from hvdtrain.report.json_lines import JsonLines
from hvdtrain.report.start import Start, note_start
from hvdtrain.report.trackers import TensorBoard, Tracker
from hvdtrain.saving import Saver
from hvdtrain.schedule.file import LearningRateFile
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.rates import epoch_learning_rate
from hvdtrain.settings import Settings
from hvdtrain.start import StartKeys, start_of_training
from hvdtrain.state import Progress
from hvdtrain.timer import Timer
from hvdtrain.trace import Note, Trace, TraceKeys, no_trace, num_runs
from hvdtrain.version import __version__
from hvdtrain.watchdog import Watchdog

MEMORY_SHARE = 0.8
"""How much of the memory that a host has left its ranks may fill with what they read, together."""

NO_COPIES: Mapping[str, str] = {}


def train(settings: Settings) -> None:
    """Train as the config says, from the last finished epoch on. Raises: HvdtrainError."""
    with open_communicator(settings) as comm:
        train_with(comm, settings)


def prepare(settings: Settings) -> None:
    """What has to be settled before the framework computes anything. Raises: ConfigError."""
    if settings.run.backend == "tensorflow":
        from hvdtrain.learner.tensorflow_setup import prepare_tensorflow

        prepare_tensorflow(settings.learner.device, launch.launch().local_rank, threads(settings, launch.launch().local_size))


def threads(settings: Settings, local_size: int) -> int:
    """How many threads a rank computes with, where a host has so many ranks."""
    ours = launch.threads_per_rank(launch.environment(), local_size, launch.cores(), launch.is_bound())
    return settings.run.num_threads or ours


def train_with(comm: Communicator, settings: Settings) -> Learner:
    """Collective. Train on ranks that are connected already; return what was trained. Raises: HvdtrainError."""
    together(comm, lambda: open_log(settings.log, comm.rank, comm.size), name="open_log")
    timer = Timer()
    interrupt = Interrupt(settings.interrupt.seconds)
    with interrupt, Watchdog(settings.run.watchdog_timeout, comm.rank) as watchdog, ExitStack() as stack:
        if (callback := as_function(settings.run.startup_callback, "startup_callback")) is not None:
            watchdog.beat("startup_callback")
            callback()
        copies = copy_data(settings, comm, watchdog, stack)
        watchdog.beat("opening the datasets")
        feeds = together(comm, lambda: open_feeds(settings, comm, copies.places), name="open_feeds")
        watchdog.beat("building the model")
        reducer = open_reducer(settings.reduce, comm, timer)
        learner = together(comm, lambda: build_learner(settings, reducer, comm), name="build_learner")
        watchdog.beat("loading and sharing the weights")
        checkpoints = CheckpointFolder(Path(settings.run.model), learner.file_suffix)
        saver = Saver(
            comm,
            learner,
            reducer,
            checkpoints,
            feeds[0].distribution,
            cleanup=parse_rule(settings.saving.cleanup_old_models),
            background=ThreadPoolExecutor(1, "saving") if settings.saving.save_in_background else None,
        )
        progress = resume(comm, saver, checkpoints, settings.start)
        pace = open_pace(settings)
        announce(settings, comm, learner, feeds, progress, pace)
        if not is_done(progress, pace):
            reporters = together(
                comm, lambda: open_reporters(settings, progress) if comm.rank == 0 else [], name="open_reporters"
            )
            Engine(
                comm,
                learner,
                reducer,
                feeds[0],
                feeds[1:],
                open_rates(settings, comm.size),
                saver,
                reporters,
                timer,
                watchdog,
                interrupt,
                progress=progress,
                pace=pace,
                trace=open_trace(comm, settings.trace, progress),
            ).run()
        for feed in feeds:
            feed.dataset.close()
    return learner


def open_pace(settings: Settings) -> Pace:
    """When to save, to tell, and to end."""
    measure = settings.newbob.learning_rate_control_error_measure
    return Pace(
        num_epochs=settings.run.num_epochs,
        ends_early=lambda history: ends_early(settings.ending, history, measure),
        save_epochs=settings.saving.save_interval,
        save_steps=settings.saving.save_interval_steps,
        save_minutes=settings.saving.save_interval_minutes,
        log_interval=settings.log.log_interval,
        finite=settings.ending.stop_on_nonfinite_train_score,
    )


def open_trace(comm: Communicator, keys: TraceKeys, progress: Progress) -> Note:
    """Collective. Where to write down what is trained on."""
    if keys.trace_sequences is None:
        return no_trace
    prefix = Path(keys.trace_sequences)
    run = on_rank_zero(comm, lambda: num_runs(prefix), name="trace")
    return Trace(prefix, run, comm.rank, progress.step)


def open_reporters(settings: Settings, progress: Progress) -> list[Reporter]:
    """Who is told of finished epochs. Raises: ConfigError."""
    folder = Path(settings.run.model).parent
    lines = JsonLines(folder / "scores.jsonl")
    lines.go_on(progress.epoch, progress.report)
    reporters: list[Reporter] = [lines]
    if settings.schedule.learning_rate_file is not None:
        reporters.append(LearningRateFile(Path(settings.schedule.learning_rate_file), progress.history))
    if settings.trackers.use_tensorboard:
        reporters.append(TensorBoard(folder / "tensorboard", progress.step))
    track_epoch = as_function(settings.trackers.track_epoch, "track_epoch")
    if track_epoch is not None:
        reporters.append(Tracker(track_epoch))
    return reporters


@contextmanager
def open_communicator(settings: Settings) -> Iterator[Communicator]:
    """Connect with the other ranks. They are only taken leave of when all get to the end together: where one fails alone,
    its end is what ends the others.

    Raises:
        LaunchError: several processes were started, but the config does not say how they belong together.
        ConfigError: a device that is not there, or a config that computes while it is read.
    """
    prepare(settings)
    started = launch.launch()
    comm: Communicator
    inside: AbstractContextManager[None] = nullcontext()
    torch_keys = settings.torch_distributed
    if settings.reduce.use_horovod:
        from hvdtrain.comm.horovod import open_horovod, peer_failures  # imports a framework

        inside = peer_failures()  # TensorFlow's graphs exchange by themselves
        comm = open_horovod(settings.run.backend, settings.reduce.horovod_timeline)
    elif torch_keys is not None:
        from hvdtrain.comm.torch_dist import open_torch_distributed

        comm = open_torch_distributed(torch_keys.backend, torch_keys.init_method, torch_keys.timeout_sec)
    elif started.size > 1:
        error = LaunchError(
            f"expected to be told how the {started.size} processes that {started.launcher} started belong together, got neither "
            "use_horovod nor torch_distributed: they would train the same model over each other's files "
            "(add ++use_horovod 1 to the command, or ++torch_distributed {})"
        )
        error.on_every_rank = True
        raise error
    else:
        comm = SingleCommunicator()
    try:
        with inside, connected(comm):
            yield comm
    except HvdtrainError as failure:
        if failure.on_every_rank:
            comm.close()
        raise
    comm.close()


def copy_data(settings: Settings, comm: Communicator, watchdog: Watchdog, at_the_end: ExitStack) -> Copies:
    """Collective. Copy the data files to a local disk of every host, if the config asks for it. Raises: DataError."""
    keys = settings.copies
    folder = None if keys.cache_dir is None else CopyFolder(Path(keys.cache_dir).expanduser(), parse_size(keys.cache_dir_size))
    specs = [part for spec in (settings.train, *settings.evaluations) for part in spec.all()]
    files = dict.fromkeys(path for spec in specs for path in spec.copied)

    def work(progress: Callable[[int], None]) -> tuple[str, Copies]:
        return socket.gethostname(), Copies() if folder is None else copy_files(folder, files, progress)

    last_line = time.monotonic()

    def alive(copied: list[int]) -> None:
        nonlocal last_line
        watchdog.beat("copying the data files")
        if time.monotonic() - last_line >= settings.log.log_interval and folder is not None:
            last_line = time.monotonic()
            say(4, f"copied {size_text(max(copied))} so far ...")

    if folder is not None:
        say(4, f"copying the data files to {keys.cache_dir}, where there is no copy yet ...")
        at_the_end.callback(folder.close)
    (_, copies), everywhere = patiently(comm, work, alive, name="copy_data")
    if folder is not None:
        for level, line in copy_lines(keys.cache_dir or "", everywhere):
            say(level, line)
    return copies


def open_some(
    settings: Settings, comm: Communicator, specs: Iterable[DatasetSpec], copies: Mapping[str, str] = NO_COPIES
) -> list[Feed]:
    """Open datasets; those of their files that have copies are read from these. Raises: DataError."""
    sizes = parse_sizes(settings.data.cache_size)
    memory = host_memory() if any(size != 0 for size in sizes) else None
    host = Budget(None if memory is None else int(MEMORY_SHARE * memory) // comm.local_size)
    budgets = {"train": sizes[0], "dev": sizes[1]}

    def feed(spec: DatasetSpec) -> Feed:
        training = spec is settings.train
        distribution = settings.reduce.horovod_dataset_distribution if training else "shard"
        batch_keys = settings.batch.of_each_of(comm.size)
        batch_keys = batch_keys.of_training() if training else batch_keys.of_evaluation()
        budget = Budget(budgets.get(spec.name, sizes[2]), within=host)
        files = Unchanged(copies.get(path, path) if path in part.copied else path for part in spec.all() for path in part.files)
        dataset = open_dataset(spec, Means(budget, copies))
        return Feed(
            spec.name,
            dataset,
            spec.order,
            batch_keys,
            comm.rank,
            comm.size,
            distribution,
            subset=listed(dataset, spec.order.seq_list_filter_file),
            chunks=cut(dataset.lengths, settings.chunks) if training else None,
            files=files,
            budget=budget,
        )

    return [feed(spec) for spec in specs]


def open_feeds(settings: Settings, comm: Communicator, copies: Mapping[str, str] = NO_COPIES) -> list[Feed]:
    """Open the datasets of a training, train first. Raises: DataError."""
    feeds = open_some(settings, comm, (settings.train, *settings.evaluations), copies)
    for other in feeds[1:]:
        missing = [key for key in feeds[0].dataset.streams if key not in other.dataset.streams]
        if missing:
            raise DataError(
                f"{other.name}: expected the data keys of train ({', '.join(feeds[0].dataset.streams)}), "
                f"got none called {', '.join(missing)}"
            )
    for name, keys in {**_limits_by_key(settings.batch), "chunking": keys_of(settings.chunks)}.items():
        for key in keys:
            if key not in feeds[0].dataset.streams:
                raise DataError(f"{name}: expected data keys of train ({', '.join(feeds[0].dataset.streams)}), got {key!r}")
    return feeds


def _limits_by_key(keys: BatchKeys) -> dict[str, list[str]]:
    """The data keys that the batch keys name, by batch key."""
    values = {field.name: getattr(keys, field.name) for field in fields(keys)}
    return {name: list(value) for name, value in values.items() if isinstance(value, dict)}


def open_reducer(keys: ReduceKeys, comm: Communicator, timer: Timer) -> Reducer:
    """How the ranks learn together."""
    if keys.horovod_reduce_type == "param":
        return ParamAverage(comm, timer, keys.horovod_param_sync_step, keys.horovod_param_sync_time_diff)
    return GradReduce(comm, timer, keys.horovod_avg_grad)


def build_learner(settings: Settings, reducer: Reducer, comm: Communicator) -> Learner:
    """The model and the optimizer, in the config's framework. Raises: ConfigError."""
    num_threads = threads(settings, comm.local_size)
    seed = settings.run.random_seed
    places = {"rank": comm.rank, "local_rank": comm.local_rank, "threads": num_threads}
    if settings.run.backend == "tensorflow":  # a framework is imported when it is known to be needed
        from hvdtrain.learner.tensorflow import build_tensorflow_learner

        return build_tensorflow_learner(settings.learner, reducer, **places, seed=seed, epoch=1, step=0)
    from hvdtrain.learner.torch import build_torch_learner

    return build_torch_learner(
        settings.learner,
        reducer,
        **places,
        seed=seed,
        epoch=1,
        step=0,
        batch_norm=comm.channel("sync_batch_norm") if settings.learner.sync_batch_norm and comm.size > 1 else None,
        sharded=comm if settings.torch_distributed is not None and settings.torch_distributed.sharded and comm.size > 1 else None,
    )


def resume(comm: Communicator, saver: Saver, checkpoints: CheckpointFolder, keys: StartKeys) -> Progress:
    """Collective. Load what training starts from, and make the model the same on all ranks.

    Raises:
        CheckpointError: what was asked for is not there, or a rank cannot read it.
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
    fresh = start.checkpoint is None
    saver.preload([one for one in parse_preloads(keys.preload_from_files) if one.is_due(training=True, fresh=fresh)])
    if fresh:
        saver.share()
    return progress


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


def announce(settings: Settings, comm: Communicator, learner: Learner, feeds: list[Feed], progress: Progress, pace: Pace) -> None:
    """Collective. Say what is about to happen: ranks, data, batches, the rule for the learning rate. Raises: DataError."""
    started = launch.launch()
    hosts = comm.gather((socket.gethostname(), learner.device_name), name="hosts")
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
    say(4, f"model: {learner.num_parameters} parameters")
    if comm.size > 1:
        say(4, f"ranks: {_how(settings.reduce)}")
        if settings.reduce.horovod_scale_lr:
            factor = scale_learning_rate(1.0, settings.reduce.horovod_scale_lr, comm.size)
            say(4, f"horovod_scale_lr: every learning rate is multiplied by {factor:.6g} for {comm.size} ranks")
        if settings.reduce.horovod_dataset_distribution == "random_seed_offset":
            say(4, f"every rank goes through all data in its own order: an epoch is {comm.size} passes")
    if comm.rank == 0:
        in_effect = {key.name: (key.value, key.origin) for key in effective(settings)}
        note_start(Path(settings.run.model).parent, Start(hosts, in_effect, first, learner.num_parameters))
    if is_done(progress, pace):
        early = pace.ends_early(progress.history)
        say(3, f"Already trained until final epoch {progress.epoch}, nothing to do{f': {early}' if early else ''}.")


def _how(keys: ReduceKeys) -> str:
    if keys.horovod_reduce_type == "grad":
        return f"gradients are {'averaged' if keys.horovod_avg_grad else 'summed'} every step"
    if keys.horovod_param_sync_time_diff is not None:
        return f"parameters are averaged about every {keys.horovod_param_sync_time_diff:g} s and at the end of an epoch"
    return f"parameters are averaged after every {keys.horovod_param_sync_step} updates and at the end of an epoch"
