"""Processes that each do part of a job and exchange a word now and then, over mpi4py. Training goes through Horovod."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hvdtrain.comm import launch
from hvdtrain.errors import ConfigError, HvdtrainError, LaunchError, PeerFailure

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


class Peers(Protocol):
    """The ranks of a job without tensors. One process alone is a job of size 1."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Collective. Every rank's picklable value, in rank order, on every rank."""
        ...

    def tell_failure(self) -> None:
        """Let the other ranks know, at once and without waiting for them, that this one failed."""
        ...

    def has_failed(self) -> bool:
        """Whether another rank told its failure. Costs a microsecond, so it can be asked for every sequence."""
        ...

    def abort(self, status: int) -> None:
        """End all ranks, wherever they are. One process alone goes on and ends by itself."""
        ...


class Alone:
    """One process: everything collective is the identity."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def tell_failure(self) -> None:
        pass

    def has_failed(self) -> bool:
        return False

    def abort(self, status: int) -> None:
        pass


class Crashed(HvdtrainError):
    """A bug on one of several ranks, such as an exception in a user's own Python. The message is its traceback."""


def agreed(peers: Peers, work: Callable[[], T]) -> T:
    """Collective. Run `work` on every rank; where it fails on any rank, all ranks raise the error of the lowest such rank.

    `work` should ask `peers.has_failed()` now and then and raise PeerFailure if so: then nobody works on in vain.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as failure:
        error = failure
        if peers.size > 1 and not isinstance(failure, HvdtrainError):  # any other might not travel
            error = Crashed("".join(traceback.format_exception(failure)).rstrip())
        if not isinstance(failure, PeerFailure):
            peers.tell_failure()
    failures = [(rank, one) for rank, one in enumerate(peers.gather(error)) if one is not None]
    causes = [(rank, one) for rank, one in failures if not isinstance(one, PeerFailure)]
    if failures:
        rank, first = (causes or failures)[0]
        if len(causes) < peers.size and isinstance(first, HvdtrainError) and not isinstance(first, ConfigError):
            first = first.of_rank(rank)
        raise first
    return result  # type: ignore[no-any-return]
