"""Opening a job: the ranks, the data, the model and its checkpoints. `open_session` is the one way to do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.hooks import CheckpointHooks, DiskProtocol, constants_of
from hvdtrain.checkpoint.kept_models import KeptModels
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.lock import lock_model, other_locks
from hvdtrain.checkpoint.progress import BestModel, Progress
from hvdtrain.checkpoint.saver import Saver
from hvdtrain.checkpoint.start import (
    StartingPoint,
    call_hooks,
    load_trained,
    position_of_model,
    resume,
    start_of_task,
    start_of_training,
)
from hvdtrain.comm import this_process
from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.config.plugins import Registry
from hvdtrain.config.references import as_function
from hvdtrain.data.feed import Feed
from hvdtrain.errors import PeerFailure
from hvdtrain.learner.base import Learner
from hvdtrain.learner.buffers import named_kinds
from hvdtrain.learner.contents import BackgroundSaver
from hvdtrain.learner.epoch_scores import SCORING, Scoring
from hvdtrain.learner.frameworks import FRAMEWORKS, NEW, SAVERS, BuildOptions, Extend
from hvdtrain.learner.model_state import ROLES
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.state_base import StateBase
from hvdtrain.report.ends import record_end, record_stop
from hvdtrain.runtime import log
from hvdtrain.runtime.goodput import Goodput, steady_time
from hvdtrain.runtime.interrupt import Interrupt, Stopped
from hvdtrain.runtime.log import open_log
from hvdtrain.runtime.mpirun import print_through_mpirun
from hvdtrain.runtime.records import claim_records
from hvdtrain.runtime.timer import Timer
from hvdtrain.runtime.watchdog import SECONDS_TO_END, Watchdog
from hvdtrain.settings import Settings
from hvdtrain.start_up.checkpoints import checkpoint_folder, checkpoint_hooks_of, fetch_needed_models, mirror_of
from hvdtrain.start_up.data import changed_files, compare_with_checkpoint, copy_data, open_datasets, open_feeds
from hvdtrain.start_up.epochs import open_epochs
from hvdtrain.start_up.ranks import job_began, open_communicator, threads
from hvdtrain.start_up.sigterm import act_on_sigterm
from hvdtrain.training.session import Session

Purpose = Literal["train", "dry_run", "evaluate", "forward", "export", "load", "statistics", "measure"]
"""The purpose of a job: train; train a few batches and write nothing; evaluate, forward or export a trained model; load it
without data; load it with the training data, for statistics; measure steps of a new model."""

WITH_TRAINED = ("evaluate", "forward", "export", "load", "statistics")
"""The purposes that use a trained model."""


@contextmanager
def open_session(settings: Settings, purpose: Purpose, comm: Communicator | None = None) -> Iterator[Session]:
    """Collective. Connect the ranks, open the data, build the model and load what the purpose needs.

    Args:
        comm: ranks that are connected already; None: connect them as the config says.

    Raises:
        HvdtrainError: a mistake in the config, a data file or a checkpoint, on all ranks alike.
    """
    with ExitStack() as watched:  # closed after the connection, as a rank may hang while disconnecting, too
        session: Session | None = None
        background_saver = _fork_saver(settings) if purpose == "train" and comm is None else None  # before there are threads
        try:
            with open_communicator(settings) if comm is None else nullcontext(comm) as connection, ExitStack() as stack:
                session = _open(settings, purpose, connection, background_saver, watched, stack)
                with ExitStack() as open_feeds:
                    if not settings.process.is_own:  # else an error ends the process, and its workers with it
                        open_feeds.callback(close, session.feeds)
                    try:
                        yield session
                    except Stopped as stopped:
                        if purpose == "train":
                            record_stop(settings.records, connection.rank, stopped)
                        by_mpirun = connection.rank == 0 and session.interrupt.reason == "SIGTERM"
                        if by_mpirun and print_through_mpirun(str(stopped)):
                            raise stopped.as_printed() from None
                        raise
                    finally:
                        session.watchdog.beat("closing the job", "unhurried")
                    if settings.process.is_own:
                        close(session.feeds)
        except PeerFailure as failure:
            if session is None:
                raise
            # A truncated data file kills the rank that reads it (SIGBUS).
            changed = [str(error) for _, error in changed_files(session.feeds)]
            raise failure.with_causes((*session.watchdog.ended_ranks(SECONDS_TO_END), *changed)) from failure.__cause__


def close(feeds: Iterable[Feed]) -> None:
    """Close the datasets."""
    for feed in feeds:
        feed.dataset.close()


def _fork_saver(settings: Settings) -> BackgroundSaver | None:
    """On rank 0, what writes checkpoints in the background, if the config asks for it."""
    if not settings.saving.save_in_background or not settings.process.is_own or this_process.place().rank:
        return None
    return _open_saver(settings, may_fork=True)


def _open_saver(settings: Settings, *, may_fork: bool) -> BackgroundSaver | None:
    return SAVERS[settings.run.backend](may_fork) if settings.run.backend in SAVERS else None


def _open(
    settings: Settings,
    purpose: Purpose,
    comm: Communicator,
    background_saver: BackgroundSaver | None,
    watched: ExitStack,
    stack: ExitStack,
) -> Session:
    """Collective. Open everything but the connection. The order matters, as each step needs those before it:

    1. the keys are the same on all ranks, else these would wait for each other in different places;
    2. signals and the log, so that what follows can be stopped and is printed;
    3. the lock, before anything is written next to the model;
    4. the watchdog, before what takes long;
    5. the data;
    6. what to load: get_model is called with its epoch and step;
    7. the model, the optimizer and the saver;
    8. the weights and the progress, with which the data is compared;
    9. hooks, and the keys of epochs, which see the loaded model.

    Args:
        background_saver: that of a fork; None: it is opened here.
        watched: closes the watchdog once the ranks are disconnected.
        stack: closes everything else before that.
    """
    launcher = this_process.launcher()
    if launcher.restarts == "all ranks":
        together(comm, launcher.refuse_to_repeat, name="former_failure")
    check_keys(settings, purpose, comm)  # first of all: other keys may mean other messages, and ranks would wait for ever
    limit = settings.interrupt.seconds if purpose == "train" else None
    seconds_left = None if limit is None else limit - (steady_time() - job_began(settings))
    interrupt = Interrupt(seconds_left, launcher.grace)
    if purpose == "train" and settings.process.handles_signals:
        stack.enter_context(interrupt)
    if purpose != "measure":
        together(
            comm,
            lambda: open_log(settings.log, comm.rank, comm.size, settings.process, this_process.environment()),
            name="open_log",
        )
        for message in (*settings.warnings, *settings.misplaced_keys):
            log.warning(message)
        for message in settings.notes:
            log.info(message)
    if purpose in ("train", "dry_run"):
        together(comm, lambda: _require_packages(settings) if comm.rank == 0 else None, name="packages")
    if purpose == "train":
        together(comm, lambda: _lock(Path(settings.run.model), stack) if comm.rank == 0 else None, name="lock")
    watchdog = _watch(settings, purpose, comm, watched)
    interrupt.on_sigterm = partial(act_on_sigterm, comm, watchdog, interrupt)
    feeds = _open_data(settings, purpose, comm, watchdog, stack)
    launcher.leave_checks([feed.files for feed in feeds if feed.files is not None])
    watchdog.beat("looking for a checkpoint")
    checkpoints = checkpoint_folder(settings)
    checkpoint_hooks = [] if purpose == "statistics" else checkpoint_hooks_of(settings)  # those of a file as it is
    disk = next((disk for hooks in checkpoint_hooks if (disk := hooks.disk(checkpoints)) is not None), None)
    _fetch_checkpoint(settings, purpose, comm, checkpoints, checkpoint_hooks)
    start = StartingPoint()  # a measurement loads nothing
    position = NEW
    if purpose != "measure":
        start, position = on_rank_zero(comm, lambda: _find_start(settings, purpose, checkpoints, checkpoint_hooks), name="start")
    watchdog.beat("building the model")
    if purpose in WITH_TRAINED:  # the model's file has the average over time
        settings = replace(settings, learner=replace(settings.learner, ema_decay=None))
    timer = Timer()
    reducer = settings.reduce.reducer(comm, timer)
    learner = together(
        comm, lambda: build_learner(settings, reducer.gradients, comm, checkpoint_hooks, position), name="build_learner"
    )
    if purpose in ("train", "dry_run") and comm.size > 1:
        check_models(settings, comm, learner)
    watchdog.beat("loading and sharing the weights")
    checkpoints.num_pretrain_epochs = learner.state.num_pretrain_epochs
    best = BestModel(checkpoints, settings.measure, settings.evaluation.serves("best_model"))
    loader = Loader(comm, learner.state, reducer.sync, checkpoints)
    kept = KeptModels(checkpoints, best, checkpoint_hooks)
    distribution = feeds[0].distribution if feeds else "shard"
    background = _background(settings, learner.state, disk, background_saver, stack)
    saver = Saver(loader, distribution, kept, background, disk)
    progress = Progress()
    if purpose in ("train", "dry_run"):
        progress = _resume(settings, comm, loader, start, checkpoint_hooks)
        fetch_needed_models(settings, comm, checkpoints, partial(kept.needed, progress))
        watchdog.beat("comparing the data with that of the checkpoint")
        compare_with_checkpoint(settings, comm, progress, feeds)
    elif purpose in WITH_TRAINED:
        progress = load_trained(loader, start, settings.start, checkpoint_hooks)
        learner.begin_epoch(max(1, progress.epoch), progress.step)
    if purpose != "measure" and settings.start.load_model_post_hooks:
        hooks = settings.start.load_model_post_hooks
        together(comm, lambda: call_hooks(hooks, learner.model), name="load_model_post_hooks")
        if progress.current is None:  # within an epoch, the models of the ranks may differ
            loader.broadcast()
    epochs = open_epochs(settings, comm, learner, watchdog, stack, progress.current, purpose == "train")
    of_epochs = checkpoint_hooks if purpose == "train" else []
    return Session(
        comm, timer, watchdog, interrupt, feeds, learner, reducer, saver, best, progress, epochs, Goodput(), loader, of_epochs
    )


def _require_packages(settings: Settings) -> None:
    """Raises: ConfigError, if what a key names is not installed."""
    for section in settings.sections.values():
        section.require_packages()


def _find_start(
    settings: Settings, purpose: Purpose, checkpoints: CheckpointFolder, checkpoint_hooks: Sequence[CheckpointHooks]
) -> tuple[StartingPoint, tuple[int, int]]:
    """On rank 0, what to load, and the epoch and the step that get_model is called with. Raises: CheckpointError."""
    if purpose in WITH_TRAINED:
        start = start_of_task(settings.start, checkpoints, any(hooks.fills_model() for hooks in checkpoint_hooks))
    else:
        start = start_of_training(settings.start, checkpoints)
    read_progress = FRAMEWORKS[settings.run.backend].read_progress
    return start, NEW if read_progress is None else position_of_model(start, settings.start, checkpoints, read_progress)


def _resume(
    settings: Settings, comm: Communicator, loader: Loader, start: StartingPoint, checkpoint_hooks: Sequence[CheckpointHooks]
) -> Progress:
    """Collective. Load what a training starts from. Raises: CheckpointError."""
    state = loader.state
    for hooks in checkpoint_hooks:
        hooks.built(loader)
    progress = resume(comm, loader, loader.checkpoints, start, settings.start, checkpoint_hooks)
    progress.history = [
        replace(record, scores={state.score_name(name): score for name, score in record.scores.items()})
        for record in progress.history
    ]
    if state.base_hash is not None:
        together(comm, state.check_base, name="frozen_parameters")
    for hooks in checkpoint_hooks:
        hooks.restored(progress)
    return progress


def _lock(prefix: Path, stack: ExitStack) -> None:
    """Make sure that no other job trains this model, and that none writes into its records. Raises: ConfigError."""
    stack.enter_context(lock_model(prefix))
    claim_records(prefix, is_alone=not other_locks(prefix))


WATCHDOGS: Registry[Callable[[Settings, Communicator, Purpose], Watchdog]] = Registry("watchdogs")
"""Those of plug-ins; the last one is used."""

SCORINGS: Registry[Callable[[Settings], Scoring]] = Registry("scorings")
"""Those of plug-ins; the last one is used."""

LEARNER_EXTENSIONS: Registry[Callable[[Settings, Communicator], Extend | None]] = Registry("learner_extensions")
"""Those of plug-ins, which all ranks call before get_model."""


def _watch(settings: Settings, purpose: Purpose, comm: Communicator, stack: ExitStack) -> Watchdog:
    """Collective. Start the watchdog of this rank, if there is one, and record how a training ends."""
    make = WATCHDOGS.last
    watchdog = Watchdog() if make is None else make(settings, comm, purpose)
    stack.enter_context(watchdog)
    if purpose == "train":
        stack.enter_context(record_end(settings.records, comm.rank))
    return watchdog


def _background(
    settings: Settings, state: StateBase, disk: DiskProtocol | None, saver: BackgroundSaver | None, stack: ExitStack
) -> ThreadPoolExecutor | None:
    """The thread that writes or copies checkpoints, if the config asks for it; `saver` copies them, if it is open already."""
    if not settings.saving.save_in_background and disk is None:
        return None
    state.saver = _open_saver(settings, may_fork=False) if saver is None else saver
    stack.callback(state.close)  # after the thread, which is the next callback
    background = ThreadPoolExecutor(1, "saving")
    stack.callback(background.shutdown, wait=not settings.process.is_own)  # else the interpreter waits for it at exit
    return background


def _open_data(settings: Settings, purpose: Purpose, comm: Communicator, watchdog: Watchdog, stack: ExitStack) -> list[Feed]:
    """Collective. The datasets that the purpose needs. Raises: DataError."""
    if purpose not in ("measure", "load"):
        if (callback := as_function(settings.run.startup_callback, "startup_callback")) is not None:
            watchdog.beat("startup_callback")
            callback()
    if purpose in WITH_TRAINED:
        example = settings.datasets[:2][-1:]  # an evaluated dataset if there is one
        specs_of = {"evaluate": settings.evaluations, "forward": (settings.forward,), "export": example, "load": ()}
        specs_of["statistics"] = (settings.train,)
        watchdog.beat("opening the datasets")
        if purpose in ("forward", "export"):
            settings = replace(settings, batch=settings.batch.whole_sequences())
        specs = [spec for spec in specs_of[purpose] if spec is not None]
        copies = copy_data(settings, specs, comm, watchdog, stack, remote_only=True)
        return together(comm, lambda: open_datasets(settings, comm, specs, copies, watchdog), name="open_feeds")
    copies = copy_data(settings, settings.datasets, comm, watchdog, stack, remote_only=purpose != "train")
    watchdog.beat("opening the datasets")
    return together(comm, lambda: open_feeds(settings, comm, copies, watchdog), name="open_feeds")


def build_learner(
    settings: Settings,
    gradient_exchange: GradientExchange,
    comm: Communicator,
    checkpoint_hooks: Sequence[CheckpointHooks] = (),
    position: tuple[int, int] = NEW,
) -> Learner:
    """The model and the optimizer, in the config's framework. Raises: ConfigError.

    Args:
        position: the epoch and the step that get_model is called with.
    """
    framework = FRAMEWORKS[settings.run.backend]
    extends = "learner extensions" in framework.features
    extensions = [make(settings, comm) for make in LEARNER_EXTENSIONS.values()] if extends else []
    options = BuildOptions(
        rank=comm.rank,
        local_rank=comm.local_rank,
        threads=threads(settings, comm.local_size),
        seed=settings.run.random_seed,
        precision=replace(settings.precision.precision(), narrow_gradients=settings.reduce.has_narrow_range and comm.size > 1),
        bucket_bytes=comm.bucket_bytes,
        constants=constants_of(checkpoint_hooks),
        model_format=settings.saving.checkpoint_format or framework.suffix,
        position=position,
        extensions=[extend for extend in extensions if extend is not None],
        scoring=SCORING if SCORINGS.last is None else SCORINGS.last(settings),
    )
    learner = framework.build(settings.learner, gradient_exchange, options)
    learner.scoring = options.scoring
    return learner


def check_keys(settings: Settings, purpose: Purpose, comm: Communicator) -> None:
    """Collective. Raises: ConfigError, unless all ranks have the same purpose and the same keys, except their own."""
    if comm.size > 1:
        check_alike(comm, "keys", {"the purpose of the job": purpose, **settings.shared_keys})


def check_models(settings: Settings, comm: Communicator, learner: Learner) -> None:
    """Collective. Raises: ConfigError, unless all ranks have models with the same tensors and kinds of modules in one order."""
    shapes = named_kinds(learner.state, ROLES)
    shapes |= {
        f"module {name or 'itself'}": f"[{number}] {kind}" for number, (name, kind) in enumerate(learner.kinds_of_modules())
    }
    if learner.state.base_hash is not None:  # rank 0's values reach the other ranks, but a resumed training compares all
        shapes["the hash of the frozen parameters"] = learner.state.base_hash
    check_alike(comm, "model", shapes)
    if checksums := learner.state.other_checksums():
        check_alike(comm, "extra_models", checksums)


def _fetch_checkpoint(
    settings: Settings,
    purpose: Purpose,
    comm: Communicator,
    checkpoints: CheckpointFolder,
    checkpoint_hooks: Sequence[CheckpointHooks],
) -> None:
    """Collective. Fetch the newest checkpoint from where plug-ins keep it, if a training continues from it, and from
    `checkpoint_mirror`, unless the job starts with another model."""
    other_model = settings.start.load is not None and purpose in WITH_TRAINED  # a training ignores it if there is a checkpoint
    if settings.start.start_epoch != "auto" or other_model or purpose == "measure":
        return
    for hooks in checkpoint_hooks if purpose == "train" else ():
        hooks.fetch(comm, checkpoints)
    if (mirror := mirror_of(settings)) is not None:
        mirror.fetch_newest(comm, checkpoints)
