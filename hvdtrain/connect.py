"""Connecting with the other ranks, by whatever the config says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator
from hvdtrain.comm.current import connected
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.settings import Settings


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


def prepare(settings: Settings) -> None:
    """What has to be settled before the framework computes anything. Raises: ConfigError."""
    if settings.run.backend == "tensorflow":
        from hvdtrain.learner.tensorflow_setup import prepare_tensorflow

        prepare_tensorflow(settings.learner.device, launch.launch().local_rank, threads(settings, launch.launch().local_size))


def threads(settings: Settings, local_size: int) -> int:
    """How many threads a rank computes with, where a host has so many ranks."""
    ours = launch.threads_per_rank(launch.environment(), local_size, launch.cores(), launch.is_bound())
    return settings.run.num_threads or ours
