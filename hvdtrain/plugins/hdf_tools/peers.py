"""The ranks of a job without tensors, which only divide work.

`open_peers` connects the processes that the launcher started; `run_on_all` runs work on all of them, and a failure of one ends
the work on all.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from hvdtrain.comm import this_process
from hvdtrain.comm.base import together
from hvdtrain.comm.mpi import world
from hvdtrain.errors import HvdtrainError, PeerFailure

T = TypeVar("T")

FAILED = 1
"""The tag of the message by which a rank reports its failure."""

POLL_INTERVAL = 0.005
"""Seconds between two tests of whether all ranks have reached a gather."""


class Peers:
    """The ranks of a job without tensors. This class is a single process, a job of size 1: every collective is the identity."""

    rank = 0
    size = 1

    def gather(self, value: T, *, name: str) -> list[T]:
        """Collective. Return every rank's picklable value, in rank order, on every rank."""
        return [value]

    def report_failure(self) -> None:
        """Report to the other ranks, without waiting for them, that this rank failed."""

    def has_failed(self) -> bool:
        """Whether another rank reported a failure. It takes about a microsecond, so it can be called for every sequence."""
        return False

    def abort(self, status: int) -> None:
        """End all ranks at once. In a single process this does nothing, as it ends by itself."""


class MPIPeers(Peers):
    """The ranks of an MPI job."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.rank = world.Get_rank()
        self.size = world.Get_size()

    def gather(self, value: T, *, name: str) -> list[T]:
        # Poll, because a rank that waits inside MPI occupies a core and does not react to Ctrl-C.
        barrier = self._world.Ibarrier()
        while not barrier.Test():
            time.sleep(POLL_INTERVAL)
        while self._world.Iprobe(tag=FAILED):  # the gathered values contain the failures, too
            self._world.recv(tag=FAILED)
        return list(self._world.allgather(value))

    def report_failure(self) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self._world.isend(None, rank, tag=FAILED)

    def has_failed(self) -> bool:
        return bool(self._world.Iprobe(tag=FAILED))

    def abort(self, status: int) -> None:
        self._world.Abort(status)


def open_peers() -> Peers:
    """Connect the processes that the launcher started; a process without a launcher is a job of size 1.

    Raises:
        LaunchError: there are several processes, but MPI does not connect them.
    """
    place = this_process.place()
    return Peers() if place.size == 1 else MPIPeers(world(place))


class Crashed(HvdtrainError):
    """A bug on one of several ranks, such as an exception in the user's code. The message is its traceback."""


def run_on_all(peers: Peers, work: Callable[[], T]) -> T:
    """Collective. As `together`, also for a crash, and the other ranks hear of a failure at once.

    `work` should check `peers.has_failed()` regularly and then raise PeerFailure, so that no rank continues for nothing.
    """

    def reporting() -> T:
        try:
            return work()
        except PeerFailure:
            raise
        except Exception as failure:
            peers.report_failure()
            if peers.size == 1 or isinstance(failure, HvdtrainError):
                raise
            raise Crashed("".join(traceback.format_exception(failure)).rstrip()) from None  # others might not be picklable

    return together(peers, reporting, name="work")
