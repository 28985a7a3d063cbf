"""Ranks as threads of one process: a communicator without a launch, for what needs other ranks but no model and no transport."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any, TypeVar

from hvdtrain.comm.base import SMALL_BUCKET, Communicator, Narrow, Op, Tensor, num_bytes
from hvdtrain.errors import PeerFailure

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which ranks that never meet fail."""


class Meeting:
    """Where the ranks hand each other values: all call `exchange` equally often, in the same order.

    Args:
        whole: the meeting of all ranks, if this is one of a part of them.
    """

    def __init__(self, size: int, whole: "Meeting | None" = None) -> None:
        self.barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size
        self._parts: list[Meeting] = []
        self.mail: list[Queue[Any]] = [Queue() for _ in range(size)]
        if whole is not None:
            whole._parts.append(self)

    def abort(self) -> None:
        """Make the ranks that wait here fail."""
        for meeting in (self, *self._parts):
            meeting.barrier.abort()

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
    """One of several ranks, each of which is a thread. Tensors are numpy arrays, or PyTorch's.

    Attributes:
        messages: the name and the bytes of every all-reduce.
    """

    transport = "threads"

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self.sent = 0
        self.messages: list[tuple[str, int]] = []

    def start(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        *,
        name: str,
        owners: Sequence[int] | None = None,
        narrow: Narrow | None = None,
    ) -> Any:
        sent = [narrowed(tensor, narrow) for tensor in tensors]
        self.sent += num_bytes(sent)
        self.messages.append((name, num_bytes(sent)))
        return (
            [tensor + 0 for tensor in sent],
            [tensor.dtype for tensor in tensors],
            op,
            name,
            owners,
        )  # others are waited for in `finish` only

    def finish(self, handle: Any) -> list[Tensor]:
        if len(handle) == 2:  # of `all_to_all`
            import torch

            rows, name = handle
            return [torch.stack([theirs[self.rank] for theirs in self._meeting.exchange(self.rank, name, rows)])]
        tensors, types, op, name, owners = handle
        everybodys = self._meeting.exchange(self.rank, name, tensors)
        sums = [of_type(sum(alike), dtype) for alike, dtype in zip(zip(*everybodys, strict=True), types, strict=True)]
        reduced = [total / (self.size if op == "average" else 1) for total in sums]
        if owners is not None:  # what others get is undefined
            reduced = [
                total if owner == self.rank else total * float("nan") for total, owner in zip(reduced, owners, strict=True)
            ]
        return reduced

    def bucket_bytes(self, on_gpu: bool) -> int:
        return SMALL_BUCKET

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        copies = [tensor + 0 for tensor in tensors]  # rank 0 may change its own before the others have read them
        return [tensor + 0 for tensor in self._meeting.exchange(self.rank, name, copies)[0]]

    def gather_rows(
        self, tensors: Sequence[Tensor], *, name: str, lengths: Sequence[int] | None = None, narrow: Narrow | None = None
    ) -> list[Tensor]:
        import torch

        everybodys = self._meeting.exchange(self.rank, name, [torch.as_tensor(tensor) for tensor in tensors])
        return [torch.cat(alike) for alike in zip(*everybodys, strict=True)]

    def gather(self, value: T, *, name: str) -> list[T]:
        return self._meeting.exchange(self.rank, name, value)

    def send_to_first(self, value: T | None, source: int, *, name: str) -> T | None:
        if self.rank == source:
            self._meeting.mail[source].put((name, value))
        if self.rank != 0:
            return None
        sent, received = self._meeting.mail[source].get(timeout=PATIENCE)
        assert sent == name
        return received

    def all_to_all(self, rows: Tensor, *, name: str) -> Any:
        self.sent += num_bytes([rows])
        self.messages.append((name, num_bytes([rows])))
        return rows + 0, name

    def channel(self, name: str) -> "ThreadCommunicator":
        return self

    def split(self, sets: Sequence[Sequence[int]], *, name: str) -> "ThreadCommunicator | None":
        meetings = self._meeting.exchange(self.rank, name, [Meeting(len(ranks), self._meeting) for ranks in sets])[0]
        for ranks, meeting in zip(sets, meetings, strict=True):
            if self.rank in ranks:
                return ThreadCommunicator(meeting, list(ranks).index(self.rank), len(ranks))
        return None

    def close(self) -> None:
        pass


def narrowed(tensor: Tensor, narrow: Narrow | None) -> Tensor:
    """A float32 tensor of PyTorch in 16 bits."""
    import torch

    is_narrowed = narrow is not None and getattr(tensor, "dtype", None) == torch.float32
    return tensor.to(getattr(torch, narrow)) if is_narrowed else tensor


def of_type(tensor: Tensor, dtype: Any) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


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
            meeting.abort()
            raise

    with ThreadPoolExecutor(size, "rank") as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    failures = [error for future in running if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda error: isinstance(error, PeerFailure)):
        raise error
    return [future.result() for future in running]
