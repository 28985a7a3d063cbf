"""The communicator: the collectives that a rank can call, a job of one rank, and functions built from these collectives.

`Communicator` is the interface of all transports (`horovod`, `torch_dist`); `SingleCommunicator` is for a job of size 1.
The functions after them (`all_reduce`, `together`, `gather_together`, `on_rank_zero`) work with any communicator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

from hvdtrain.errors import HvdtrainError, PeerFailure

T = TypeVar("T")

Tensor = Any
"""A tensor of the job's framework. Only the learner and the transport know which framework that is."""

Op = Literal["sum", "average"]

Narrow = Literal["float16", "bfloat16"]
"""A 16-bit type to which float32 tensors can be converted to be sent."""

SMALL_BUCKET, LARGE_BUCKET = 2 << 20, 25 << 20
"""Bytes of a bucket of gradients. Over a network between CPUs, 2 MB already take long compared with the latency. NCCL needs
larger messages to reach its bandwidth: as large as the buckets of PyTorch's DDP."""

ONE_GPU_EACH = "expected one GPU per process, got two processes on the same GPU, which NCCL does not support"
"""The cause, in an error of NCCL's that does not say it."""


class Communicator(Protocol):
    """The ranks of a job. A job of one process has size 1, and its collectives are the identity.

    All methods except `close` are collective: all ranks call them in the same order and with tensors of the same
    shapes. Order and shapes may depend on the model and on the plan of the epoch, but never on the contents of a batch.
    `name` identifies the operation in Horovod's stall report and timeline.

    Attributes:
        sent: bytes of the tensors that this rank has handed to `start`, except while a graph was traced. (With the usual ring of
            N ranks, each of them sends 2 (N - 1) / N of these over the network.)
        transport: what connects the ranks, such as "Horovod over MPI".

    Raises:
        PeerFailure: on the ranks that wait for a rank that failed.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    sent: int
    transport: str

    def start(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        *,
        name: str,
        owners: Sequence[int] | None = None,
        narrow: Narrow | None = None,
    ) -> Any:
        """Collective. Start an asynchronous all-reduce and return a handle for `finish`; may overwrite the tensors.

        Args:
            owners: for each tensor the rank that needs the result. A transport with a reduce-scatter then sends half the bytes,
                and what other ranks get for this tensor is undefined. None: all ranks need all results.
            narrow: the type to which float32 tensors are converted to be sent and added up. Tensors of other types, such as
                counts (float64), are sent unchanged.
        """
        ...

    def finish(self, handle: Any) -> list[Tensor]:
        """Wait for the all-reduce that `start` returned this handle for; return the reduced tensors, in their own types."""
        ...

    def bucket_bytes(self, on_gpu: bool) -> int:
        """The number of bytes of gradients, on a GPU or in main memory, that are worth sending at once."""
        ...

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        """Collective. Return rank 0's tensors on every rank."""
        ...

    def gather_rows(
        self, tensors: Sequence[Tensor], *, name: str, lengths: Sequence[int] | None = None, narrow: Narrow | None = None
    ) -> list[Tensor]:
        """Collective. Concatenate every rank's tensors along the first axis, in rank order; its length may differ by rank.

        Args:
            lengths: that length by rank, if it is known and the same for all tensors; the ranks then need not exchange it.
            narrow: as of `start`.
        """
        ...

    def gather(self, value: T, *, name: str) -> list[T]:
        """Collective. Return every rank's picklable value, in rank order, on every rank."""
        ...

    def send_to_first(self, value: T | None, source: int, *, name: str) -> T | None:
        """Collective. Return the picklable value of rank `source` on rank 0, and None on others. With torch.distributed, they
        neither receive it nor wait; Horovod cannot send from rank to rank."""
        ...

    def all_to_all(self, rows: Tensor, *, name: str) -> Any:
        """Collective. Start to send row r of a tensor to rank r, and return a handle. `finish` returns a list with one tensor of
        the same shape, whose row r is from rank r."""
        ...

    def channel(self, name: str) -> Communicator:
        """Collective. Return a communicator of the same ranks whose collectives need no fixed order relative to this one's.

        Only the communicator of the whole job has channels and can be split.
        """
        ...

    def split(self, sets: Sequence[Sequence[int]], *, name: str) -> Communicator | None:
        """Collective. Return the communicator of the set to which this rank belongs, or None. Its ranks are numbered from 0.

        Args:
            sets: the ranks of each set, in ascending order; no rank is in two sets. The same on all ranks.
        """
        ...

    def close(self) -> None:
        """Disconnect from the other ranks. No collective can be called afterwards."""
        ...


class SingleCommunicator:
    """A job of size 1: every collective is the identity.

    Args:
        local_rank, local_size: this process's rank and the number of processes on its host, if several jobs of size 1 share
            the host; they determine the device and the number of threads.
    """

    rank = 0
    size = 1
    transport = "one process"
    sent = 0

    def __init__(self, local_rank: int = 0, local_size: int = 1) -> None:
        self.local_rank = local_rank
        self.local_size = local_size

    def start(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        *,
        name: str,
        owners: Sequence[int] | None = None,
        narrow: Narrow | None = None,
    ) -> list[Tensor]:
        return list(tensors)

    def finish(self, handle: list[Tensor]) -> list[Tensor]:
        return handle

    def bucket_bytes(self, on_gpu: bool) -> int:
        return LARGE_BUCKET if on_gpu else SMALL_BUCKET

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        return list(tensors)

    def gather_rows(
        self, tensors: Sequence[Tensor], *, name: str, lengths: Sequence[int] | None = None, narrow: Narrow | None = None
    ) -> list[Tensor]:
        return list(tensors)

    def gather(self, value: T, *, name: str) -> list[T]:
        return [value]

    def send_to_first(self, value: T | None, source: int, *, name: str) -> T | None:
        return value

    def all_to_all(self, rows: Tensor, *, name: str) -> list[Tensor]:
        return [rows]

    def channel(self, name: str) -> SingleCommunicator:
        return self

    def split(self, sets: Sequence[Sequence[int]], *, name: str) -> SingleCommunicator | None:
        return self if any(sets) else None

    def close(self) -> None:
        pass


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """The size of tensors of PyTorch or TensorFlow. Those of a graph that is being traced have no values yet and count as 0."""
    sizes = []
    for tensor in tensors:
        if hasattr(tensor, "nbytes"):
            sizes.append(tensor.nbytes)
        elif hasattr(tensor, "numpy"):
            sizes.append(tensor.shape.num_elements() * tensor.dtype.size)
    return sum(sizes)


def all_reduce(comm: Communicator, tensors: Sequence[Tensor], op: Op, *, name: str) -> list[Tensor]:
    """Collective. Return the sum or average of each tensor over the ranks; may overwrite the given tensors."""
    return comm.finish(comm.start(tensors, op, name=name))


class Gathering(Protocol):
    """What the next functions need of ranks: those of a `Communicator`, or of `comm/mpi.py`."""

    rank: int
    size: int

    def gather(self, value: T, *, name: str) -> list[T]: ...


def together(comm: Gathering, work: Callable[[], T], *, name: str) -> T:
    """Collective. Run `work` on every rank; if it raises an HvdtrainError on any rank, raise one on all ranks.

    All ranks raise the error of the lowest rank that failed. Any other exception is a bug, not a user's mistake: it is not
    caught, and ends the job like any crash.
    """
    results: list[T] = []
    gather_together(comm, lambda: results.append(work()), name=name)
    return results[0]


def gather_together(comm: Gathering, work: Callable[[], T], *, name: str) -> list[T]:
    """Collective. As `together`, for picklable values: return those of all ranks, in the order of the ranks."""
    error: HvdtrainError | None = None
    value: Any = None
    try:
        value = work()
    except HvdtrainError as failure:
        error = failure
    answers = comm.gather((error, value), name=name)
    failures = [(rank, failure) for rank, (failure, _) in enumerate(answers) if failure is not None]
    if failures:
        causes = [(rank, failure) for rank, failure in failures if not isinstance(failure, PeerFailure)] or failures
        rank, first = causes[0]
        if len(causes) < comm.size:
            first = first.of_rank(rank)
        raise first.on_all_ranks()
    return [value for _, value in answers]


def on_rank_zero(comm: Gathering, work: Callable[[], T], *, name: str) -> T:
    """Collective. Run `work` on rank 0 while the others wait; return its picklable value on every rank, or raise its error."""
    return gather_together(comm, lambda: work() if comm.rank == 0 else None, name=name)[0]  # type: ignore[return-value]


MAX_PAUSE = 1.0
"""Maximum interval in seconds between two exchanges of `run_with_heartbeat`."""


def run_with_heartbeat(
    comm: Communicator, work: Callable[[Callable[[int], None]], T], heartbeat: Callable[[list[int]], None], *, name: str
) -> T:
    """Collective. Run `work` in a thread on every rank and wait until it is done on all ranks.

    Errors are raised as by `together`.

    Args:
        work: called with a function `report(number)`, which it calls with a changing number as long as it makes progress.
        heartbeat: called while any rank makes progress, with the numbers of all ranks, for example to reset the watchdog.

    Returns:
        The result of `work` on this rank.
    """
    progress: list[int] = [0]
    results: list[T] = []
    errors: list[Exception] = []

    def report(number: int) -> None:
        progress[0] = number

    def run() -> None:
        try:
            results.append(work(report))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)  # a daemon does not keep an interrupted program alive
    thread.start()
    last_states: list[Any] = []
    pause = 0.01
    while True:
        thread.join(pause)
        states = comm.gather((thread.is_alive(), progress[0]), name=name)
        if states != last_states:
            heartbeat([number for _, number in states])
            last_states = states
        if not any(is_running for is_running, _ in states):
            break
        pause = min(MAX_PAUSE, 2 * pause)

    def result_or_error() -> T:
        if errors:
            raise errors[0]
        return results[0]

    return together(comm, result_or_error, name=f"{name}.end")
