"""What the rest of the program may ask of the other ranks, and a job of one rank."""

from __future__ import annotations

import threading
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


class SingleCommunicator:
    """A job of size 1: every collective is the identity.

    Args:
        local_rank, local_size: this process's place among those on its host that belong to other jobs, for devices and threads.
    """

    rank = 0
    size = 1

    def __init__(self, local_rank: int = 0, local_size: int = 1) -> None:
        self.local_rank = local_rank
        self.local_size = local_size

    def start(self, tensors: Sequence[Tensor], op: Op, *, name: str) -> list[Tensor]:
        return list(tensors)

    def finish(self, handle: list[Tensor]) -> list[Tensor]:
        return handle

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        return list(tensors)

    def gather_rows(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        return list(tensors)

    def gather(self, value: T, *, name: str) -> list[T]:
        return [value]

    def channel(self, name: str) -> SingleCommunicator:
        return self

    def close(self) -> None:
        pass


PAUSE = 1.0
"""Seconds between two questions to the other ranks, at most."""


def patiently(
    comm: Communicator, work: Callable[[Callable[[int], None]], T], alive: Callable[[list[int]], None], *, name: str
) -> tuple[T, list[T]]:
    """Collective. Run `work` on every rank, in a thread, until all are done; errors are raised as by `together`.

    Args:
        work: is handed a function, which it calls with a number that changes as long as it makes progress.
        alive: called while any rank makes progress, with every rank's number; for the watchdog, and for people.

    Returns:
        What the work returned here, and on all ranks in rank order.
    """
    told: list[int] = [0]
    outcome: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(work(lambda number: told.__setitem__(0, number)))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)  # it must not keep a program that is interrupted
    thread.start()
    seen: list[Any] = []
    pause = 0.01
    while True:
        thread.join(pause)
        states = comm.gather((thread.is_alive(), told[0]), name=name)
        if states != seen:
            alive([number for _, number in states])
            seen = states
        if not any(working for working, _ in states):
            break
        pause = min(PAUSE, 2 * pause)

    def result() -> T:
        if errors:
            raise errors[0]
        return outcome[0]

    made = together(comm, result, name=f"{name}.end")
    return made, comm.gather(made, name=f"{name}.results")
