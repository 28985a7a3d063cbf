"""The log lines before a training begins and after its end, and the record of its start."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from functools import partial

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.comm import this_process
from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, num_bytes, on_rank_zero, together
from hvdtrain.data.describe import batch_lines, feed_lines
from hvdtrain.data.feed import Feed
from hvdtrain.data.files import size_text
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Learner
from hvdtrain.learner.compression import COMPRESSIONS
from hvdtrain.learner.model_state import ROLES
from hvdtrain.learner.precision import cpu_emulates_bfloat16
from hvdtrain.learner.reducers import scale_learning_rate
from hvdtrain.report.commit import commit_of
from hvdtrain.report.rows import end_row
from hvdtrain.report.starts import Start, append_start, hosts_text, ranks_text, report_command
from hvdtrain.runtime import log
from hvdtrain.runtime.log import BETWEEN
from hvdtrain.settings import Settings
from hvdtrain.start_up.checkpoints import checkpoint_folder
from hvdtrain.start_up.data import DATA_CHECKS
from hvdtrain.start_up.effective import effective_keys
from hvdtrain.training.limits import TrainingLimits
from hvdtrain.training.session import Session
from hvdtrain.version import __version__

Host = tuple[str, str]
"""A rank's host and device."""


def gather_hosts(session: Session) -> list[Host]:
    """Collective. By rank, its host and device."""
    return session.comm.gather((socket.gethostname(), session.learner.device_name), name="hosts")


def announce(settings: Settings, session: Session, limits: TrainingLimits, hosts: list[Host]) -> None:
    """Collective. Log what is about to happen: ranks, data, batches, the rule for the learning rate. Raises: DataError."""
    level = 4 if limits.are_reached(session.progress) else 3  # what is not about to happen is of less interest
    log_ranks(settings, session.comm.size, hosts, level)
    log_data(settings, session)
    log_model(settings, session.learner, level)
    if session.comm.size > 1:
        log_exchange(settings, session, level)
    log_prospects(settings, session.progress, limits, level)


def log_ranks(settings: Settings, size: int, hosts: list[Host], level: int) -> None:
    """Log where the ranks run, and warn of problems with the way in which they were started."""
    place = this_process.place()
    log.write(level, f"hvdtrain {__version__}, {settings.run.backend}: {ranks_text(size)}, {hosts_text(hosts)}")
    if settings.reduce.use_horovod and place.launcher is None:
        log.warning("use_horovod is set, but this process was started alone: it trains as one rank (for 2: mpirun -np 2 ...)")
    if settings.torch_distributed is not None and place.launcher is None and settings.launch.ngpu is None:
        log.warning(
            "torch_distributed is set, but this process was started alone: it trains as one rank (for 2: ++ngpu 2, or torchrun)",
        )
    if this_process.is_bound() and this_process.cores() == 1:
        log.warning("this rank is bound to a single core of several; mpirun --bind-to none lets it use more")
    if len({name for name, _ in hosts}) > 1 and this_process.misses_lost_hosts(this_process.environment()):
        log.warning(f"mpirun does not notice when a host is lost; with {this_process.KEEPALIVE} it does")


def check_plans(comm: Communicator, feeds: Sequence[Feed], epoch: int) -> None:
    """Collective. Raises: ConfigError, if the inputs of the ranks' plans, or what plug-ins compare, differ; DataError."""
    shared = [feed for feed in feeds if feed.distribution == "shard" and comm.size > 1]

    def inputs() -> dict[str, str]:
        return {f"{feed.name}: {name}": text for feed in shared for name, text in feed.plan_inputs(epoch).items()}

    check_alike(comm, "plan", together(comm, inputs, name="plan_inputs"))
    for check in DATA_CHECKS.values():
        check.between_ranks(comm, feeds, epoch)


def log_data(settings: Settings, session: Session) -> None:
    """Collective. Log the datasets, and the batches of the next epoch. Raises: DataError."""
    comm = session.comm
    epoch = min(session.progress.epoch + 1, settings.run.num_epochs)
    feeds = session.epochs.feeds(session.feeds, epoch)
    check_plans(comm, feeds, epoch)
    if (line := settings.batch.remainder_line(comm.size)) is not None:
        log.warning(line)

    def data_lines() -> list[tuple[int, str]]:
        lines = [line for feed in feeds for line in feed_lines(feed, comm.local_size)]
        return lines + batch_lines(feeds[0].batch_keys, epoch, comm.size)

    for level, line in together(comm, data_lines, name="data_lines"):
        log.write(level, line)


def log_model(settings: Settings, learner: Learner, level: int) -> None:
    dtype = settings.precision.precision().dtype
    computes = "" if dtype == "float32" else f", computes in {dtype} where it can"
    log.write(level, f"model: {learner.num_parameters} parameters{computes}")
    if dtype == "bfloat16" and learner.device_name == "CPU" and cpu_emulates_bfloat16():
        log.warning(f"mixed_precision: this CPU has no instructions for {dtype} (avx512_bf16, amx_bf16): float32 is faster on it")
    if (steps := settings.accumulation.accum_grad_multiple_step) not in (None, 1):
        count = f"{steps}" if isinstance(steps, int) else "as many as accum_grad_multiple_step says"
        log.detail(f"updates: each adds up the gradients of several batches of every rank: {count}")


def log_exchange(settings: Settings, session: Session, level: int) -> None:
    """Log what the ranks exchange and over what, and which effects their number has."""
    size = session.comm.size
    scale = settings.reduce.learning_rate_scale
    factor = scale_learning_rate(1.0, scale, size)
    kind = "divide" if scale is True else scale
    rate = f"learning rates x {factor:.4g} by horovod_scale_lr ({kind!r})" if scale else "learning rates as in the config"
    caches = [summary for feed in session.feeds[:1] if (summary := feed.cache.summary())]
    facts = [session.comm.transport, session.reducer.description, message_text(settings, session), rate, *caches]
    log.write(level, f"ranks: {BETWEEN.join(facts)}")
    if message := settings.reduce.ignored_key_line(settings.reduce.reduce_type):
        log.warning(message)
    if settings.reduce.dataset_distribution == "random_seed_offset":
        log.detail(f"every rank goes through all data in its own order: an epoch is {size} passes")


def message_text(settings: Settings, session: Session) -> str:
    """The bytes that a rank sends for an update, or for an average of parameters."""
    keys = settings.reduce
    size = num_bytes(list(session.learner.state.tensors("parameters").values()))
    chosen = COMPRESSIONS.get(keys.compression or "")
    bits = 32 if chosen is None else 16 if chosen.narrow is not None else chosen.bits
    varies = bits is None or keys.sends_vary
    return f"{'up to ' if varies else ''}{size_text(size * (bits or 32) // 32)} each time"


def log_prospects(settings: Settings, progress: Progress, limits: TrainingLimits, level: int) -> None:
    """Log from where training continues, and a restart; how the best epoch is selected; and whether all epochs are done."""
    if progress.start:
        log.write(level, progress.start)
    may_restart = settings.launch.max_restarts or this_process.launcher().restarts != "never"
    if may_restart and limits.save_steps is None and limits.save_minutes is None:
        log.write(
            level, "a restart continues from the last finished epoch that was saved; save_interval_minutes or _steps loses less"
        )
    log.write(level, f"the best epoch is that of {settings.measure.describe(progress.history)}")
    if limits.are_reached(progress):
        early = None if progress.epoch >= limits.num_epochs else limits.end_after_epoch(progress)
        is_loaded = progress.file is None  # by `load`: there is no checkpoint, and none will be written
        hint = (
            f" (`load` counts as epoch {progress.epoch}: ++start_epoch 1 trains its model from epoch 1 on)" if is_loaded else ""
        )
        # Warn a program: if it varies keys but not the folder, it would take the old results for those of its keys.
        log.write(
            2 if is_loaded or not settings.process.is_own else 3,
            f"Already trained until final epoch {progress.epoch}, nothing to do{f': {early}' if early else ''}{hint}.",
        )


def log_end(settings: Settings, session: Session, num_epochs: int) -> None:
    """Log the time of the whole training, the best epoch and its file, and the command that shows more.

    Args:
        num_epochs: the number of epochs that this start finished.
    """
    folder = settings.records
    best = session.best.summary(session.best.records(session.progress)) if session.comm.rank == 0 else None
    total = session.goodput.seconds if num_epochs else None
    words, of_best = end_row(total, best, str(folder), report_command(folder) if settings.process.is_own else None)
    if words:
        log.row(3, words, good=of_best)


def check_space(settings: Settings, session: Session) -> None:
    """Raises: ConfigError, if the disk has less space than the newest checkpoint takes, or the model alone, if there is none."""
    folder = checkpoint_folder(settings)
    place = folder.folder.absolute()
    newest = folder.newest()
    state = session.learner.state
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    if newest is None:
        saved = state.model_tensors().keys()  # without a base model that checkpoints leave out
        tensors = [tensor for role in ROLES for name, tensor in state.tensors(role).items() if name in saved]
        needed = num_bytes(tensors)
    else:
        other_files = folder.other_files(newest, [path.name for path in place.iterdir()])
        needed = sum(path.stat().st_size for path in (newest.model_file, *(place / name for name in other_files)))
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError.of(
            "not-writable",
            f"model: expected {size_text(needed)} of free space in {place} for a checkpoint, got {size_text(free)} (free some, "
            "or choose another folder; cleanup_old_models removes old models)",
        )


def record_start(settings: Settings, session: Session, hosts: list[Host]) -> Start:
    """Collective. Append the settings and hosts of this start to starts.jsonl.

    Raises:
        ConfigError: it cannot be written.
    """
    in_effect = {key.name: (key.value, key.origin) for key in effective_keys(settings)}
    first = session.progress.epoch + 1
    size = session.learner.num_parameters
    folder = settings.records
    config_folder = (settings.files[0] if settings.files else folder).absolute().parent
    commit = commit_of(config_folder) if session.comm.rank == 0 else ""
    start = Start(hosts, in_effect, first, size, settings.texts, goodput=session.goodput.record(), commit=commit)
    on_rank_zero(session.comm, partial(append_start, folder, start), name="note_start")
    return start
