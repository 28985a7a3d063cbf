"""Connecting the ranks, with the device and the threads of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator
from hvdtrain.comm.for_configs import use_communicator
from hvdtrain.comm.launchers import check_variables
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.config.plugins import Registry
from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.runtime.goodput import process_began, steady_time
from hvdtrain.settings import Settings

Connection = tuple[Communicator, AbstractContextManager[None]]
"""The ranks, and what surrounds the work with them."""


def _connect_torch(settings: Settings, stays: bool) -> Connection:
    from hvdtrain.comm.torch_dist import leaving, open_torch_distributed  # imports the framework

    keys = settings.torch_distributed
    if keys is None:
        raise LaunchError("torch_distributed: expected a dict, got None")
    comm = open_torch_distributed(keys.backend, keys.init_method, keys.timeout_sec, stays)
    return comm, leaving() if stays else nullcontext()


TRANSPORTS: Registry[Callable[[Settings, bool], Connection]] = Registry("transports", {"torch.distributed": _connect_torch})
"""By name, a function of the settings, and of whether the process may connect its ranks again."""


@contextmanager
def open_communicator(settings: Settings) -> Iterator[Communicator]:
    """Connect to the other ranks, as the config says.

    The connection is closed only if all ranks end together. A rank that fails alone exits without closing it, which makes the
    launcher end the others.

    Raises:
        LaunchError: several processes were started, but the config does not say how to connect them.
        ConfigError: a device does not exist, or the config computes while it is read.
    """
    check_variables(this_process.environment())
    prepare(settings)
    place = this_process.place()
    comm: Communicator = SingleCommunicator()
    inside: AbstractContextManager[None] = nullcontext()
    transport = "horovod" if settings.reduce.use_horovod else "torch.distributed"
    if settings.reduce.use_horovod or settings.torch_distributed is not None:
        comm, inside = TRANSPORTS[transport](settings, not settings.process.is_own)
    elif place.size > 1:
        raise LaunchError(
            f"expected use_horovod or torch_distributed to connect the {place.size} processes that {place.launcher} started, "
            "got neither: each process would train the model by itself and overwrite the files of the others "
            "(add ++use_horovod 1 to the command, or ++torch_distributed {}; without a launcher, unset "
            f"{this_process.launcher().evidence.partition('=')[0]})"
        ).on_all_ranks()
    try:
        with inside, use_communicator(comm):
            yield comm
    except HvdtrainError as failure:
        if failure.on_every_rank:
            comm.close()
        raise
    comm.close()


def job_began(settings: Settings) -> float:
    """When the job began: its restarts by a launcher belong to it."""
    launcher = this_process.launcher()
    if launcher.began is not None:
        return launcher.began
    return process_began(launcher.parent) if settings.process.is_own else steady_time()


def prepare(settings: Settings) -> None:
    """Choose device and threads before the framework computes anything. Raises: ConfigError."""
    place = this_process.place()
    if settings.learner.deterministic:
        this_process.put(DETERMINISTIC)
    num_threads = threads(settings, place.local_size)
    FRAMEWORKS[settings.run.backend].prepare(settings.learner.device, place.local_rank, num_threads)


def threads(settings: Settings, local_size: int) -> int:
    """The number of threads a rank computes with, if `local_size` ranks share its host."""
    default = this_process.threads_per_rank(this_process.environment(), local_size, this_process.cores(), this_process.is_bound())
    return settings.run.num_threads or default


DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HOROVOD_FUSION_THRESHOLD": "0"}
"""Environment variables of libraries for `deterministic`. They give cuBLAS a workspace with which the order of sums is fixed, and
keep Horovod from fusing messages: which ones it fuses, and so the order of sums, depends on when they arrive."""
