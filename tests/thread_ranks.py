"""Ranks as threads of one process: a communicator without a launch, for what needs other ranks but no model and no transport."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hvdtrain.comm.base import Communicator, Op, Tensor, num_bytes
from hvdtrain.errors import PeerFailure

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which ranks that never meet fail."""


class Meeting:
    """Where the ranks hand each other values: all call `exchange` equally often, in the same order."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, name: str, value: T) -> list[T]:
        """Every rank's value. Raises: PeerFailure, where another rank has failed."""
        self._values[rank] = name, value
        try:
            self.barrier.wait(PATIENCE)
            found = list(self._values)
            self.barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            raise PeerFailure("another rank has failed") from None
        names = [theirs for theirs, _ in found]
        assert len(set(names)) == 1, f"the ranks are in different collectives: {names}"
        return [theirs for _, theirs in found]


class ThreadCommunicator:
    """One of several ranks, each of which is a thread. Tensors are numpy arrays, or PyTorch's."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self.sent = 0

    def start(self, tensors: Sequence[Tensor], op: Op, *, name: str) -> Any:
        self.sent += num_bytes(tensors)
        return [tensor + 0 for tensor in tensors], op, name  # others are waited for in `finish` only

    def finish(self, handle: Any) -> list[Tensor]:
        tensors, op, name = handle
        everybodys = self._meeting.exchange(self.rank, name, tensors)
        return [sum(alike) / (self.size if op == "average" else 1) for alike in zip(*everybodys, strict=True)]

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        copies = [tensor + 0 for tensor in tensors]  # rank 0 may change its own before the others have read them
        return [tensor + 0 for tensor in self._meeting.exchange(self.rank, name, copies)[0]]

    def gather_rows(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        import torch

        everybodys = self._meeting.exchange(self.rank, name, [torch.as_tensor(tensor) for tensor in tensors])
        return [torch.cat(alike) for alike in zip(*everybodys, strict=True)]

    def gather(self, value: T, *, name: str) -> list[T]:
        return self._meeting.exchange(self.rank, name, value)

    def channel(self, name: str) -> "ThreadCommunicator":
        return self

    def close(self) -> None:
        pass


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """Call `work` on every rank of a job; what it returned, by rank.

    Raises:
        Exception: what the first rank raised that did not merely wait for another one.
    """
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadCommunicator(meeting, rank, size))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size, "rank") as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    failures = [error for future in running if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda error: isinstance(error, PeerFailure)):
        raise error
    return [future.result() for future in running]
