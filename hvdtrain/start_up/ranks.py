"""Connecting the ranks, with the device and the threads of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, SingleCommunicator
from hvdtrain.comm.for_configs import use_communicator
from hvdtrain.comm.launchers import check_variables
from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.learner.frameworks import FRAMEWORKS, library_of
from hvdtrain.settings import Settings


@contextmanager
def open_communicator(settings: Settings) -> Iterator[Communicator]:
    """Connect to the other ranks, as the config says.

    The connection is closed only if all ranks end together. A rank that fails alone exits without closing it, which makes the
    launcher end the others.

    Raises:
        LaunchError: several processes were started, but the config does not say how to connect them.
        ConfigError: a device does not exist, or the config computes while it is read.
    """
    check_variables(launch.environment())
    prepare(settings)
    started = launch.launch()
    comm: Communicator
    inside: AbstractContextManager[None] = nullcontext()
    torch_keys, stays = settings.torch_distributed, not settings.process.is_own
    if settings.reduce.use_horovod:
        from hvdtrain.comm.horovod import open_horovod, peer_failures  # imports a framework

        inside = peer_failures()  # TensorFlow's graphs contain collectives that are not called through `comm`
        binding, in_sets = library_of(settings.run.backend), settings.reduce.group is not None
        comm = open_horovod(binding, settings.reduce.horovod_timeline, stays, in_sets)
    elif torch_keys is not None:
        from hvdtrain.comm.torch_dist import leaving, open_torch_distributed

        inside = leaving() if stays else inside
        comm = open_torch_distributed(torch_keys.backend, torch_keys.init_method, torch_keys.timeout_sec, stays)
    elif started.size > 1:
        raise LaunchError(
            f"expected use_horovod or torch_distributed to connect the {started.size} processes that {started.launcher} started, "
            "got neither: each process would train the model by itself and overwrite the files of the others "
            "(add ++use_horovod 1 to the command, or ++torch_distributed {}; without a launcher, unset "
            f"{launch.launcher().place.partition('=')[0]})"
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
        launch.put({"HOROVOD_TIMELINE": "DYNAMIC"})  # starts with the profiler
    num_threads = threads(settings, started.local_size)
    FRAMEWORKS[settings.run.backend].prepare(settings.learner.device, started.local_rank, num_threads)


def threads(settings: Settings, local_size: int) -> int:
    """The number of threads a rank computes with, if `local_size` ranks share its host."""
    default = launch.threads_per_rank(launch.environment(), local_size, launch.cores(), launch.is_bound())
    return settings.run.num_threads or default


DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HOROVOD_FUSION_THRESHOLD": "0"}
"""Environment variables of libraries for `deterministic`. They give cuBLAS a workspace with which the order of sums is fixed, and
keep Horovod from fusing messages: which ones it fuses, and so the order of sums, depends on when they arrive."""
