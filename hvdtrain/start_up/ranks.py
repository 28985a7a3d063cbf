"""Connecting the ranks, with the device and the threads of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, SingleCommunicator, use_communicator
from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.settings import Settings


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
        raise LaunchError(
            f"expected to be told how the {started.size} processes that {started.launcher} started belong together, got neither "
            "use_horovod nor torch_distributed: they would train the same model over each other's files "
            "(add ++use_horovod 1 to the command, or ++torch_distributed {})"
        ).on_all_ranks()
    else:
        comm = SingleCommunicator()
    try:
        with inside, use_communicator(comm):
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
