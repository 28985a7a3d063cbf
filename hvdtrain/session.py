"""An open job: the ranks, the data, the model and its checkpoints. `open_session` is the one way to open it."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal

from hvdtrain.checkpoint.changed_keys import changed_key_lines
from hvdtrain.checkpoint.folder import CheckpointFolder, parse_rule
from hvdtrain.checkpoint.lock import only_training_of
from hvdtrain.checkpoint.preload import constant_preloads, take_over
from hvdtrain.checkpoint.progress import BestModel, Progress
from hvdtrain.checkpoint.saver import MODEL_KINDS, Saver, Saves
from hvdtrain.checkpoint.start import call_hooks, check_data, load_trained, resume
from hvdtrain.comm import launch
from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, SingleCommunicator, Tensor, connected, run_with_heartbeat, together
from hvdtrain.comm.horovod_gloo import is_elastic
from hvdtrain.comm.local import HUNG, PEER_FAILED, refuse_to_repeat, restarts_of_torchrun
from hvdtrain.comm.torch_rendezvous import names_of_this_host
from hvdtrain.config.source import as_function
from hvdtrain.data.combine.cache import Budget, host_memory
from hvdtrain.data.copies import Copies, CopyFolder, copy_files
from hvdtrain.data.dataset import Scanning
from hvdtrain.data.expected import check_lengths, check_streams
from hvdtrain.data.feed import Feed, copy_lines
from hvdtrain.data.files import Unchanged, parse_size, parse_sizes, size_text
from hvdtrain.data.keys import DatasetSpec
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.chunk_keys import keys_of
from hvdtrain.data.plan.chunk_keys import parse as parse_chunking
from hvdtrain.data.plan.chunks import cut, listed
from hvdtrain.data.sources import OpeningContext, open_dataset
from hvdtrain.errors import DataError, HvdtrainError, LaunchError, PeerFailure
from hvdtrain.learner.base import Kind, Learner
from hvdtrain.learner.frameworks import FRAMEWORKS, BuildOptions
from hvdtrain.learner.reducer import GradientExchange, Reducer
from hvdtrain.runtime import log
from hvdtrain.runtime.heartbeats import exchange_contacts
from hvdtrain.runtime.interrupt import Interrupt, Stopped
from hvdtrain.runtime.log import SCREEN, open_log, open_terminal
from hvdtrain.runtime.peers import print_through_mpirun
from hvdtrain.runtime.timer import Timer
from hvdtrain.runtime.watchdog import SECONDS_TO_END, Ending, Watchdog
from hvdtrain.settings import Settings

Purpose = Literal["train", "dry_run", "evaluate", "forward", "export", "load", "measure"]
"""What a job is opened for: to train; to train a few batches and write nothing; to evaluate, forward or export a trained model,
or to load it, without data; to measure steps of a new model."""

SECONDS_TO_GO_ON = 120.0
"""How long Horovod's elastic driver and Gloo have until a rank that waited for one that hung goes on without it."""

WITH_TRAINED = ("evaluate", "forward", "export", "load")
"""The purposes that use a trained model."""


@dataclass(frozen=True)
class Session:
    """What a job consists of on every rank: opened, built, loaded, and about to begin.

    Attributes:
        feeds: the datasets; in a training, train comes first.
        interrupt: signals and the time limit; watched in a training only.
        best: keeps best.json, which names the best epoch.
        progress: how far the model has been trained.
    """

    comm: Communicator
    timer: Timer
    watchdog: Watchdog
    interrupt: Interrupt
    feeds: list[Feed]
    learner: Learner
    reducer: Reducer
    saver: Saves
    best: BestModel
    progress: Progress


BY_MPIRUN = (
    "SIGTERM from mpirun, as after Ctrl-C: it kills the ranks a second later and returns 1. Saving a checkpoint, if there is "
    "time (kill -USR1 PID-OF-MPIRUN leaves time for it, and returns 75)"
)
"""Printed at once, as nobody knows whether there is time."""


@contextmanager
def open_session(settings: Settings, purpose: Purpose, comm: Communicator | None = None) -> Iterator[Session]:
    """Collective. Connect the ranks, open the data, build the model and load what the purpose needs.

    Args:
        comm: ranks that are connected already; None: connect them as the config says.

    Raises:
        HvdtrainError: a mistake in the config, a data file or a checkpoint, on all ranks alike.
    """
    with ExitStack() as watched:  # ends behind the connection: a rank may hang where the ranks disconnect, too
        session: Session | None = None
        try:
            with open_communicator(settings) if comm is None else nullcontext(comm) as connection, ExitStack() as stack:
                session = _open(settings, purpose, connection, watched, stack)
                with ExitStack() as open_feeds:
                    if not settings.process.is_own:  # a process of hvdtrain's own ends with an error, and its workers with it
                        open_feeds.callback(close, session.feeds)
                    try:
                        yield session
                    except Stopped as stopped:
                        if connection.rank == 0 and session.interrupt.reason == "SIGTERM":
                            stopped.is_printed = print_through_mpirun(str(stopped))
                        raise
                    finally:
                        session.watchdog.beat("closing the job", "unhurried")
                    if settings.process.is_own:
                        close(session.feeds)
        except PeerFailure as failure:
            if session is not None:
                failure.seen = (*session.watchdog.ended_ranks(SECONDS_TO_END), *changed_files(session.feeds))
            raise


def changed_files(feeds: Iterable[Feed]) -> Iterator[str]:
    """Which data files are not those of the start any more: one that was truncated has killed the rank that read it (SIGBUS)."""
    for feed in feeds:
        try:
            if feed.files is not None:
                feed.files.check()
        except DataError as error:
            yield str(error)


def close(feeds: Iterable[Feed]) -> None:
    """Close the datasets."""
    for feed in feeds:
        feed.dataset.close()


def _open(settings: Settings, purpose: Purpose, comm: Communicator, watched: ExitStack, stack: ExitStack) -> Session:
    """Collective. Open everything but the connection.

    Args:
        watched: gets the watchdog, which is closed when the ranks are disconnected.
        stack: gets what has to be closed before.
    """
    if restarts_of_torchrun(launch.environment()):
        together(comm, lambda: refuse_to_repeat(launch.environment()), name="former_failure")
    interrupt = Interrupt(settings.interrupt.seconds if purpose == "train" else None)
    if purpose == "train" and settings.process.handles_signals:
        stack.enter_context(interrupt)
    if purpose != "measure":
        together(comm, lambda: open_log(settings.log, comm.rank, comm.size, settings.process), name="open_log")
        for message in (*settings.misspelt, *settings.misplaced):
            log.warning(message)
        if settings.without_effect:
            log.info(f"RETURNN reads from a config, and hvdtrain does not: {', '.join(settings.without_effect)}")
    if purpose in ("train", "dry_run"):
        together(comm, lambda: settings.trackers.require_packages() if comm.rank == 0 else None, name="packages")
    if purpose == "train":
        lock = only_training_of(Path(settings.run.model))
        together(comm, lambda: stack.enter_context(lock) if comm.rank == 0 else None, name="lock")
    # Measurements have deadlines of their own. Alone in a program's process, nothing waits for a step that takes long, as in a
    # debugger.
    unwatched = purpose == "measure" or (comm.size == 1 and not settings.process.is_own and settings.run.watchdog_timeout is None)
    patience = inf if unwatched else settings.run.watchdog_timeout
    heartbeats = None
    if comm.size > 1 and purpose != "measure":
        heartbeats = exchange_contacts(
            comm.rank,
            names_of_this_host() if comm.rank == 0 else (),
            lambda value: comm.gather(value, name="watchdog"),
            together=not is_elastic(launch.environment()),
            restarts=restarts_of_torchrun(launch.environment()) > 0,
        )
    watchdog = watched.enter_context(Watchdog(patience, comm.rank, heartbeats, ending(), settings.process.is_own))
    if comm.rank == 0:
        # mpirun also sends SIGTERM after a rank has failed, which it reports itself.
        interrupt.on_sigterm = lambda: print_through_mpirun(BY_MPIRUN) if not watchdog.ended_ranks(0.0) else None
    feeds = _open_data(settings, purpose, comm, watchdog, stack)
    watchdog.beat("building the model")
    if purpose in WITH_TRAINED:  # the model's file has the average over time
        settings = replace(settings, learner=replace(settings.learner, ema_decay=None))
    timer = Timer()
    reducer = settings.reduce.reducer(comm, timer)
    learner = together(comm, lambda: build_learner(settings, reducer.gradients, comm), name="build_learner")
    if purpose in ("train", "dry_run") and comm.size > 1:
        check_ranks(settings, comm, learner, update_together=reducer.gradients.steps is None)
    watchdog.beat("loading and sharing the weights")
    checkpoints = checkpoint_folder(settings)
    higher = settings.scoring.higher_is_better
    best = BestModel(checkpoints, settings.measure)
    background = ThreadPoolExecutor(1, "saving") if settings.saving.save_in_background else None
    if background is not None:
        stack.callback(background.shutdown, wait=not settings.process.is_own)  # else the process's end waits for it
    saver = Saver(
        comm,
        learner.state,
        reducer.sync,
        checkpoints,
        feeds[0].distribution if feeds else "shard",
        cleanup=parse_rule(settings.saving.cleanup_old_models, higher),
        background=background,
        best=best,
    )
    progress = Progress()
    if purpose in ("train", "dry_run"):
        progress = resume(comm, saver, checkpoints, settings.start, settings.schedule.learning_rate_file)
        keys = settings.of_results
        for line in changed_key_lines(progress.keys, keys, has_history=bool(progress.history)):
            log.info(line)
        progress.keys = keys
        watchdog.beat("comparing the data with that of the checkpoint")
        check_data(comm, progress, {feed.name: feed.parts for feed in feeds}, settings.start.accept_changed_data)
    elif purpose in WITH_TRAINED:
        progress = load_trained(comm, saver, checkpoints, settings.start)
        learner.begin_epoch(max(1, progress.epoch), progress.step)
    if purpose != "measure" and settings.start.load_model_post_hooks:
        hooks = settings.start.load_model_post_hooks
        together(comm, lambda: call_hooks(hooks, learner.model), name="load_model_post_hooks")
        if progress.current is None:  # within an epoch, the ranks may have models of their own
            saver.share()
    return Session(comm, timer, watchdog, interrupt, feeds, learner, reducer, saver, best, progress)


def check_ranks(settings: Settings, comm: Communicator, learner: Learner, *, update_together: bool) -> None:
    """Collective. Raises: ConfigError, unless all ranks have the same keys and a model of the same form."""
    keys = settings.of_all_ranks(update_together=update_together)
    check_alike(comm, keys, hint="every rank reads the config: does it depend on hvdtrain.rank() or the host?", name="keys")
    form: dict[str, str] = {}
    for kind in MODEL_KINDS:
        learner.state.map_tensors(kind, lambda tensors, kind=kind: _noted_form(tensors, kind, form))  # type: ignore[misc]
    check_alike(comm, form, of="get_model: ", hint="every rank makes the model, and gets rank 0's values", name="model_form")


def _noted_form(tensors: list[Tensor], kind: Kind, form: dict[str, str]) -> list[Tensor]:
    """Note the types and shapes of a model's tensors; return the same tensors."""
    for number, tensor in enumerate(tensors):
        form[f"{kind}[{number}]"] = f"{tensor.dtype} {tuple(tensor.shape)}"
    return tensors


def checkpoint_folder(settings: Settings) -> CheckpointFolder:
    """Where the training's checkpoints are."""
    suffix = FRAMEWORKS[settings.run.backend].suffix
    return CheckpointFolder(Path(settings.run.model), suffix, settings.saving.checkpoint_format)


def _open_data(settings: Settings, purpose: Purpose, comm: Communicator, watchdog: Watchdog, stack: ExitStack) -> list[Feed]:
    """Collective. The datasets that the purpose needs. Raises: DataError."""
    if purpose in WITH_TRAINED:
        one = settings.datasets[:2][-1:]  # an evaluated dataset where there is one
        specs = {"evaluate": settings.evaluations, "forward": (settings.forward,), "export": one, "load": ()}[purpose]
        watchdog.beat("opening the datasets")
        there = [spec for spec in specs if spec is not None]
        return together(comm, lambda: open_datasets(settings, comm, there, watchdog=watchdog), name="open_feeds")
    copies = Copies()
    if purpose != "measure":
        if (callback := as_function(settings.run.startup_callback, "startup_callback")) is not None:
            watchdog.beat("startup_callback")
            callback()
        copies = copy_data(settings, comm, watchdog, stack)
    watchdog.beat("opening the datasets")
    return together(comm, lambda: open_feeds(settings, comm, copies.places, watchdog), name="open_feeds")


def ending() -> Ending:
    """How a process ends if ranks hang: so that the launcher which may start ranks again knows which of them did."""
    if launch.launch().launcher == "hvdtrain":
        return Ending(HUNG, PEER_FAILED)
    if is_elastic(launch.environment()):
        return Ending(outlives=SECONDS_TO_GO_ON)
    return Ending()


def writing_nothing(settings: Settings) -> Settings:
    """The settings without the keys that make a training write files before or within an epoch, or copy its data."""
    return replace(
        settings,
        log=replace(settings.log, log=None, log_verbosity=settings.log.targets[SCREEN]),
        copies=replace(settings.copies, cache_dir=None),
        reduce=replace(settings.reduce, horovod_timeline=None),
        saving=replace(settings.saving, save_interval_steps=None, save_interval_minutes=None),
        trace=replace(settings.trace, profile_steps=None),
    )


@contextmanager
def open_communicator(settings: Settings) -> Iterator[Communicator]:
    """Connect with the other ranks, as the config says.

    The connection is closed only if all ranks end together. A rank that fails alone exits without closing it, which ends the
    others.

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
        stays = not settings.process.is_own
        comm = open_horovod(settings.run.backend, settings.reduce.horovod_timeline, stays)
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


def prepare(settings: Settings) -> None:
    """Choose device and threads before the framework computes anything. Raises: ConfigError."""
    started = launch.launch()
    if settings.learner.deterministic:
        launch.put(DETERMINISTIC)
    if settings.trace.profile_steps is not None and settings.reduce.horovod_timeline is None:
        launch.put({"HOROVOD_TIMELINE": "DYNAMIC"})  # it is started with the profiler
    num_threads = threads(settings, started.local_size)
    FRAMEWORKS[settings.run.backend].prepare(settings.learner.device, started.local_rank, num_threads)


def threads(settings: Settings, local_size: int) -> int:
    """The number of threads a rank computes with, if `local_size` ranks share its host."""
    ours = launch.threads_per_rank(launch.environment(), local_size, launch.cores(), launch.is_bound())
    return settings.run.num_threads or ours


DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HOROVOD_FUSION_THRESHOLD": "0"}
"""What libraries read from the environment, for `deterministic`: a buffer of cuBLAS with which the order of sums is fixed; and
Horovod adds up each message by itself, as which ones it joins, and so the order of sums, depends on when they come."""

MEMORY_SHARE = 0.8
"""The share of a host's free memory that the caches of its ranks may fill together."""

NO_COPIES: Mapping[str, str] = {}


def copy_data(settings: Settings, comm: Communicator, watchdog: Watchdog, at_the_end: ExitStack) -> Copies:
    """Collective. Copy the data files to a local disk of every host, if the config asks for it. Raises: DataError."""
    keys = settings.copies
    folder = None if keys.cache_dir is None else CopyFolder(Path(keys.cache_dir).expanduser(), parse_size(keys.cache_dir_size))
    specs = [part for spec in (settings.train, *settings.evaluations) for part in spec.all()]
    files = dict.fromkeys(path for spec in specs for path in spec.copied)

    def work(progress: Callable[[int], None]) -> tuple[str, Copies]:
        return socket.gethostname(), Copies() if folder is None else copy_files(folder, files, progress)

    last_line = time.monotonic()

    def report(copied: list[int]) -> None:
        nonlocal last_line
        watchdog.beat("copying the data files")
        if time.monotonic() - last_line >= settings.log.log_interval and folder is not None:
            last_line = time.monotonic()
            log.detail(f"copied {size_text(max(copied))} so far ...")

    if folder is not None:
        log.detail(f"copying the data files to {keys.cache_dir}, where there is no copy yet ...")
        at_the_end.callback(folder.close)
    (_, copies), everywhere = run_with_heartbeat(comm, work, report, name="copy_data")
    if folder is not None:
        for level, line in copy_lines(keys.cache_dir or "", everywhere):
            log.write(level, line)
    return copies


def open_datasets(
    settings: Settings,
    comm: Communicator,
    specs: Iterable[DatasetSpec],
    copies: Mapping[str, str] = NO_COPIES,
    watchdog: Watchdog | None = None,
) -> list[Feed]:
    """Open datasets. A file that has a copy is read from the copy. Raises: DataError."""
    scanning = _scanning(settings, comm, watchdog)
    sizes = parse_sizes(settings.data.cache_size)
    specs = list(specs)
    own_sizes = [spec.cache_byte_size or 0 for spec in specs]
    memory = host_memory() if any(size != 0 for size in (*sizes, *own_sizes)) else None
    host = Budget(None if memory is None else int(MEMORY_SHARE * memory) // comm.local_size)
    budgets = {"train": sizes[0], "dev": sizes[1]}

    def feed(spec: DatasetSpec) -> Feed:
        training = spec is settings.train
        distribution = settings.reduce.dataset_distribution if training else "shard"
        batch_keys = settings.batch.of_each_of(comm.size)
        batch_keys = batch_keys.of_training() if training else batch_keys.of_evaluation()
        size = budgets.get(spec.name, sizes[2]) if spec.cache_byte_size is None else spec.cache_byte_size
        budget = Budget(size, within=host)
        files = Unchanged(copies.get(path, path) if path in part.copied else path for part in spec.all() for path in part.files)
        context = OpeningContext(budget, copies, scanning)
        dataset = open_dataset(spec, context)
        check_lengths(spec.name, dataset)
        check_streams(spec.name, dataset.streams, spec.files, settings.expected)
        if not any(lengths.any() for lengths in dataset.lengths.values()):
            raise DataError(f"{spec.name}: expected frames, got {dataset.num_sequences} sequences, all of length 0")
        opened = Feed(
            spec.name,
            dataset,
            spec.order,
            batch_keys,
            comm.rank,
            comm.size,
            distribution,
            subset=listed(dataset, spec.order.seq_list_filter_file),
            chunks=cut(dataset.lengths, settings.chunks) if training and not dataset.has_fixed_order else None,
            files=files,
            budget=budget,
            parts=context.parts,
            expected=settings.expected,
        )
        if dataset.has_fixed_order:
            _check_fixed_order(opened, chunked=training and parse_chunking(settings.chunks.chunking) is not None)
        return opened

    return [feed(spec) for spec in specs]


WORTH_A_LINE = 1.0
"""Reading all items for their lengths is told in the log if it takes longer than this number of seconds."""


def _scanning(settings: Settings, comm: Communicator, watchdog: Watchdog | None) -> Scanning:
    """What datasets need whose lengths are found by reading them: rank 0 shows a bar, and the watchdog sees progress."""

    def beat() -> None:
        if watchdog is not None:
            watchdog.beat("finding the lengths of sequences")

    @contextmanager
    def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        began, said = time.monotonic(), False
        with open_terminal(sys.stderr, sys.stdout) if comm.rank == 0 else nullcontext() as terminal:
            bar = None if terminal is None else terminal.bar(total=total, unit="seq", desc="finding lengths")

            def advance(number: int) -> None:
                nonlocal said
                beat()
                if not said and time.monotonic() - began > WORTH_A_LINE:
                    said = True
                    log.info(f"{what}: all of it is read once ...")
                if bar is not None:
                    bar.update(number)

            try:
                yield advance
            finally:
                if bar is not None:
                    bar.close()

    folder = settings.data.lengths_dir
    kept = None if folder is None else Path(folder).expanduser()
    alone = launch.cores()
    processes = alone if launch.is_bound() else max(1, alone // comm.local_size)
    return Scanning(kept, comm.rank, comm.size, progress, beat, lambda line: log.info(line), processes, alone)


def _check_fixed_order(feed: Feed, chunked: bool) -> None:
    """Refuse what reads in any order, or needs lengths that stay, for a dataset in an order of its own. Raises: DataError."""
    is_returnns = feed.dataset.window is None
    given = {
        "chunking": chunked,
        "shuffle_batches": feed.batch_keys.shuffle_batches,
        "balance_ranks": bool(feed.batch_keys.balance_ranks),
        "online_shuffle_batches": bool(feed.batch_keys.shuffle_window),
        "random_seed_offset": feed.distribution == "random_seed_offset",
        "partition_epoch": not is_returnns and feed.order_keys.partition_epoch > 1,
        "seq_list_filter_file": not is_returnns and feed.subset is not None,
    }
    what = "a dataset that RETURNN reads in its own order" if is_returnns else "an iterable, which is read from beginning to end"
    for key in [key for key, is_given in given.items() if is_given]:
        feed.dataset.close()
        raise DataError(
            f"{feed.name}: expected no {key} with {what}, got it (convert it once with hvdtrain dump and train on the HDF file)"
        )


def open_feeds(
    settings: Settings, comm: Communicator, copies: Mapping[str, str] = NO_COPIES, watchdog: Watchdog | None = None
) -> list[Feed]:
    """Open the datasets of a training, train first. Raises: DataError."""
    feeds = open_datasets(settings, comm, (settings.train, *settings.evaluations), copies, watchdog)
    for other in feeds[1:]:
        missing = [key for key in feeds[0].dataset.streams if key not in other.dataset.streams]
        if missing:
            raise DataError(
                f"{other.name}: expected the data keys of train ({', '.join(feeds[0].dataset.streams)}), "
                f"got none called {', '.join(missing)}"
            )
    there = feeds[0].dataset.streams
    for name, keys in {**_limits_by_key(settings.batch), "chunking": keys_of(settings.chunks)}.items():
        absent = [key for key in keys if key not in there]
        if absent and (len(absent) == len(keys)) and name not in LIMITS_OF_LENGTHS:
            raise DataError(f"{name}: expected data keys of train ({', '.join(there)}), got {absent[0]!r}")
        if absent:
            log.warning(
                f"{name}: without effect for {', '.join(map(repr, absent))}: the data keys of train are {', '.join(there)}"
            )
    return feeds


LIMITS_OF_LENGTHS = ("max_seq_length", "min_seq_length", "max_pad_size")
"""Keys with limits by data key, which hold for the data keys that a dataset has, as in RETURNN. A limit of a batch that holds for
none would make batches of any size."""


def _limits_by_key(keys: BatchKeys) -> dict[str, list[str]]:
    """By batch key, the data keys that it names."""
    values = {field.name: getattr(keys, field.name) for field in fields(keys)}
    return {name: list(value) for name, value in values.items() if isinstance(value, dict)}


def build_learner(settings: Settings, gradient_exchange: GradientExchange, comm: Communicator) -> Learner:
    """The model and the optimizer, in the config's framework. Raises: ConfigError."""
    constant = constant_preloads(settings.start.preload_from_files)
    is_sharded = settings.torch_distributed is not None and settings.torch_distributed.sharded
    framework = FRAMEWORKS[settings.run.backend]
    options = BuildOptions(
        rank=comm.rank,
        local_rank=comm.local_rank,
        threads=threads(settings, comm.local_size),
        seed=settings.run.random_seed,
        precision=replace(settings.precision.precision(), narrow_gradients=settings.reduce.has_narrow_range and comm.size > 1),
        batch_norm=comm.channel("sync_batch_norm") if settings.learner.sync_batch_norm and comm.size > 1 else None,
        sharded=comm if is_sharded and comm.size > 1 else None,
        bucket_bytes=comm.bucket_bytes,
        constants=partial(take_over, constant) if constant else None,
        model_format=settings.saving.checkpoint_format or framework.suffix,
    )
    return framework.build(settings.learner, gradient_exchange, options)
