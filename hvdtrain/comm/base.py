"""What the rest of the program may ask of the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

from hvdtrain.errors import HvdtrainError

T = TypeVar("T")

Tensor = Any
"""A tensor of the job's framework. Which one it is matters to nobody between the learner and the transport."""

Op = Literal["sum", "average"]


class Communicator(Protocol):
    """The ranks of a job. A job of one process is a job of size 1 whose collectives are the identity.

    Every method below, `close` excepted, is collective: all ranks call it, in the same order and with tensors of the same
    shapes, which may depend on the model and on the plan of the epoch but never on what is in a batch. The name stands in
    Horovod's stall report and timeline. Raises: PeerFailure, on the ranks that waited for one that failed.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    def start(self, tensors: Sequence[Tensor], op: Op, *, name: str) -> Any:
        """Collective. Begin an all-reduce and return at once with a handle; the tensors may be overwritten."""
        ...

    def finish(self, handle: Any) -> list[Tensor]:
        """Wait for an all-reduce that `start` began; return the reduced tensors."""
        ...

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        """Collective. Rank 0's tensors, on every rank."""
        ...

    def gather_rows(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        """Collective. The rows (first axis) of every rank's tensor, in rank order; ranks may have different numbers of them."""
        ...

    def gather(self, value: T, *, name: str) -> list[T]:
        """Collective. Every rank's picklable value, in rank order, on every rank."""
        ...

    def channel(self, name: str) -> Communicator:
        """Collective. The same ranks once more, for collectives that come in no fixed order with the others."""
        ...

    def close(self) -> None:
        """Take leave of the other ranks. Nothing can be exchanged afterwards."""
        ...


def all_reduce(comm: Communicator, tensors: Sequence[Tensor], op: Op, *, name: str) -> list[Tensor]:
    """Collective. The sum or average of every tensor over the ranks; the given tensors may be overwritten."""
    return comm.finish(comm.start(tensors, op, name=name))


def together(comm: Communicator, work: Callable[[], T], *, name: str) -> T:
    """Collective. Run `work` on every rank; where it fails with an HvdtrainError on any rank, all ranks raise.

    The error of the lowest rank that failed is raised everywhere, marked as seen by all. What is not an HvdtrainError
    is a bug, not a user's mistake: it passes through at once and ends the job as any crash does.
    """
    error: HvdtrainError | None = None
    result: Any = None
    try:
        result = work()
    except HvdtrainError as failure:
        error = failure
    failures = [(rank, failure) for rank, failure in enumerate(comm.gather(error, name=name)) if failure is not None]
    if failures:
        rank, first = failures[0]
        if len(failures) < comm.size:
            first = first.of_rank(rank)
        first.on_every_rank = True
        raise first
    return result  # type: ignore[no-any-return]


def on_rank_zero(comm: Communicator, work: Callable[[], T], *, name: str) -> T:
    """Collective. Run `work` on rank 0 while the others wait; return its picklable value on every rank, or raise its error."""

    def mine() -> T | None:
        return work() if comm.rank == 0 else None

    value = together(comm, mine, name=name)
    return comm.gather(value, name=f"{name}.value")[0]  # type: ignore[return-value]  # rank 0's is a T
