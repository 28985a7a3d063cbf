"""What is told before training starts: the ranks, the data, the batches, where training stands."""

from __future__ import annotations

import socket
from pathlib import Path

from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.data.describe import batch_lines, feed_lines
from hvdtrain.data.feed import Feed
from hvdtrain.effective import effective
from hvdtrain.engine import Pace
from hvdtrain.learner.base import Learner
from hvdtrain.log import say
from hvdtrain.reduce import ReduceKeys, scale_learning_rate
from hvdtrain.report.start import Start, note_start
from hvdtrain.settings import Settings
from hvdtrain.state import Progress
from hvdtrain.version import __version__


def announce(settings: Settings, comm: Communicator, learner: Learner, feeds: list[Feed], progress: Progress, pace: Pace) -> None:
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
        say(4, f"ranks: {_how(settings.reduce)}")
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


def _how(keys: ReduceKeys) -> str:
    if keys.horovod_reduce_type == "grad":
        return f"gradients are {'averaged' if keys.horovod_avg_grad else 'summed'} for every update"
    if keys.horovod_param_sync_time_diff is not None:
        return f"parameters are averaged about every {keys.horovod_param_sync_time_diff:g} s and at the end of an epoch"
    return f"parameters are averaged after every {keys.horovod_param_sync_step} updates and at the end of an epoch"


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
