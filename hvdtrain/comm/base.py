"""The communicator: the collectives that a rank can call, and functions built from these collectives.

`Communicator` is the interface of all transports (`torch_dist.py`, the plug-in `horovod`) and of one process (`single.py`).
The functions after it (`all_reduce`, `together`, `gather_together`, `on_rank_zero`) work with any communicator.
"""

from __future__ import annotations

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
        local_rank, local_size: this rank's number among those of its host, and how many these are.
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
