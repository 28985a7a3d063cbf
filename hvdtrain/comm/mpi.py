"""MPI through mpi4py, for tools that exchange a word now and then. Training goes through Horovod."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from hvdtrain.comm import launch
from hvdtrain.comm.peers import Alone, Peers
from hvdtrain.errors import LaunchError

T = TypeVar("T")

FAILED = 1
"""The tag of the message that a rank failed."""

PAUSE = 0.005
"""Seconds between two looks at whether the others have come."""


def open_peers() -> Peers:
    """The processes that the launcher started together with this one; one process alone where there was none.

    Raises:
        LaunchError: there are several, but MPI does not connect them.
    """
    started = launch.launch()
    return Alone() if started.size == 1 else MPIPeers(_world(started))


def from_rank_zero(value: T) -> T:
    """Collective. Rank 0's value on every rank, over MPI. Raises: LaunchError, where MPI does not connect the processes."""
    return _world(launch.launch()).bcast(value)  # type: ignore[no-any-return]


def _world(started: launch.Launch) -> Any:
    """MPI's communicator of the processes that the launcher started. Raises: LaunchError."""
    try:
        from mpi4py import MPI  # importing it starts MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"expected mpi4py to connect the {started.size} processes that {started.launcher} started, got: {error} "
            "(pip install mpi4py; or start one process)"
        ) from None
    if started.size != MPI.COMM_WORLD.Get_size():
        raise LaunchError(
            f"expected the {started.size} processes that {started.launcher} started, got {MPI.COMM_WORLD.Get_size()} from mpi4py "
            "(was mpi4py built for another MPI than the launcher's?)"
        )
    return MPI.COMM_WORLD


class MPIPeers:
    """The ranks of an MPI job."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.rank: int = world.Get_rank()
        self.size: int = world.Get_size()

    def gather(self, value: T) -> list[T]:
        # Asking in between, since a rank that waits inside MPI takes a whole core and does not hear Ctrl-C.
        everybody = self._world.Ibarrier()
        while not everybody.Test():
            time.sleep(PAUSE)
        while self._world.Iprobe(tag=FAILED):  # what was told is in what is gathered, too
            self._world.recv(tag=FAILED)
        return list(self._world.allgather(value))

    def tell_failure(self) -> None:
        for other in range(self.size):
            if other != self.rank:
                self._world.isend(None, other, tag=FAILED)

    def has_failed(self) -> bool:
        return bool(self._world.Iprobe(tag=FAILED))

    def abort(self, status: int) -> None:
        self._world.Abort(status)
