"""The communicator over Horovod: one class for its PyTorch and its TensorFlow binding."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hvdtrain.comm import this_process
from hvdtrain.comm.base import LARGE_BUCKET, ONE_GPU_EACH, SMALL_BUCKET, Communicator, Narrow, Op, Tensor, num_bytes
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.errors import LaunchError, PeerFailure
from hvdtrain.learner.frameworks import library_of
from hvdtrain.plugins.horovod.gloo import gloo_environment
from hvdtrain.settings import Settings
from hvdtrain.start_up.ranks import Connection

T = TypeVar("T")

HOW_TO_INSTALL = (
    "use_horovod: expected an installed Horovod, got: {error}\n"
    "  Install Open MPI (apt-get install openmpi-bin libopenmpi-dev), then build Horovod, which takes about two minutes:\n"
    "    python -m hvdtrain build-horovod\n"
    "  To train without Horovod, leave use_horovod out and start one process."
)

SUPPORTED_DTYPES = ("uint8", "int32", "int64", "float16", "float32", "float64")
"""The dtypes that Horovod's TensorFlow binding broadcasts."""

HINTS = {
    "torchrun": 'torchrun is for torch.distributed: ++torch_distributed "{}" instead of use_horovod (or start it with mpirun)',
    "srun": "was Horovod built with MPI, and with the MPI that srun --mpi selects? Without --mpi=pmix, Gloo connects the tasks",
}
OTHER_HINT = (
    "was Horovod built for another MPI than the launcher's? Compare with mpirun --version; "
    "python -m hvdtrain build-horovod --force rebuilds it"
)


YIELDS = "OMPI_MCA_mpi_yield_when_idle"


def open_horovod(framework: str, timeline: str | None = None, stays: bool = False, in_sets: bool = False) -> Communicator:
    """Initialize Horovod and connect the processes.

    A single process gets a SingleCommunicator: Horovod would cost it milliseconds per step.

    Args:
        framework: "torch" or "tensorflow".
        timeline: path of Horovod's timeline, which rank 0 writes.
        stays: the process may open Horovod again. As its shutdown finalizes MPI, which a process can initialize only once, it is
            left to the end of the process.
        in_sets: `split` will be called. For it, Horovod's threads exchange a few more bytes in every cycle.

    Raises:
        LaunchError: Horovod is not installed for the framework, or does not connect the processes that the launcher started.
    """
    place = this_process.place()
    if 2 * place.local_size > this_process.cores():
        # Open MPI polls in a separate thread that competes with the one that computes. With fewer than two cores per rank, a step
        # takes up to four times as long unless it yields the core while it waits. A value set by the user is kept.
        this_process.put({YIELDS: this_process.environment().get(YIELDS, "1")})
    if timeline is not None:
        this_process.put({"HOROVOD_TIMELINE": _writable(timeline, place.rank)})
    if in_sets:
        this_process.put({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    try:
        this_process.put(gloo_environment(this_process.environment()))
        binding = importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise LaunchError(HOW_TO_INSTALL.format(error=error)) from None
    with _failures_while_connecting():
        binding.init()
    if binding.size() != place.size:
        raise LaunchError(
            f"use_horovod: expected the {place.size} processes that {place.launcher} started, got {binding.size()} from "
            f"Horovod ({HINTS.get(place.launcher or '', OTHER_HINT)})"
        )
    if binding.size() == 1:
        if not stays:
            binding.shutdown()
        return SingleCommunicator()
    return HorovodCommunicator(binding, stays)


def connect(settings: Settings, stays: bool) -> Connection:
    """Connect the ranks as the config says. Raises: LaunchError.

    Args:
        stays: see `open_horovod`.
    """
    if "profile_steps" in settings.origins and settings.reduce.horovod_timeline is None:
        this_process.put({"HOROVOD_TIMELINE": "DYNAMIC"})  # starts with the profiler
    binding = library_of(settings.run.backend)
    in_sets = settings.reduce.needs_groups
    comm = open_horovod(binding, settings.reduce.horovod_timeline, stays, in_sets)
    return comm, peer_failures()  # also around TensorFlow's graphs, whose collectives are not called through `comm`


class HorovodCommunicator:
    """The ranks of a Horovod job, or some of them.

    The two bindings differ only in the asynchronous operations, which TensorFlow's does not have. The TensorFlow binding passes
    names on only within graphs: operations outside of them (parameters, scores) appear in Horovod's reports under the type of
    the operation, such as HorovodAllgather.

    Args:
        process_set: Horovod's set of these ranks; None: all ranks.
    """

    def __init__(self, binding: ModuleType, stays: bool = False, process_set: Any = None) -> None:
        self._hvd: Any = binding
        self._stays = stays
        self._asynchronous = hasattr(binding, "grouped_allreduce_async_")
        self._is_whole = process_set is None
        self._set = binding.global_process_set if process_set is None else process_set
        self._first: int = 0 if process_set is None else process_set.ranks[0]  # Horovod counts the roots of broadcasts in the job
        self._sets: dict[tuple[int, ...], Any] = {}  # those made by `split`
        self.sent = 0
        controller = "MPI" if binding.mpi_enabled() else "Gloo"
        self.transport = f"Horovod over {controller}{' and NCCL' if binding.nccl_built() else ''}"
        self.rank: int = binding.rank() if process_set is None else process_set.rank()
        self.size: int = binding.size() if process_set is None else process_set.size()
        self.local_rank: int = binding.local_rank()
        self.local_size: int = binding.local_size()

    def start_timeline(self, file: Path) -> None:
        """Make rank 0 write Horovod's timeline from now on. Requires HOROVOD_TIMELINE=DYNAMIC when Horovod is initialized."""
        self._hvd.start_timeline(str(file))

    def stop_timeline(self) -> None:
        self._hvd.stop_timeline()

    def start(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        *,
        name: str,
        owners: Sequence[int] | None = None,  # all ranks get all results: Horovod's reduce-scatter cuts every tensor evenly
        narrow: Narrow | None = None,
    ) -> Any:
        if not tensors:
            return []
        divisor = self.size if narrow is not None and op == "average" else None  # Horovod would divide in 16 bits
        horovod_op = self._hvd.Average if op == "average" and divisor is None else self._hvd.Sum
        sent = [self._sendable(tensor, narrow) for tensor in tensors]
        self.sent += num_bytes(sent)
        with peer_failures():
            if not self._asynchronous:
                reduced = self._hvd.grouped_allreduce(sent, op=horovod_op, name=name, process_set=self._set)
                return self._restore(reduced, tensors, divisor)
            handle = self._hvd.grouped_allreduce_async_(sent, op=horovod_op, name=name, process_set=self._set)
        return handle, list(tensors), divisor

    def finish(self, handle: Any) -> list[Tensor]:
        if isinstance(handle, list):
            return handle
        number, tensors, divisor = handle
        with peer_failures():
            reduced = self._hvd.synchronize(number)
        if tensors is None:  # of `all_to_all`, with the numbers of received rows
            return [reduced[0]]
        return self._restore(reduced, tensors, divisor)

    def bucket_bytes(self, on_gpu: bool) -> int:
        return LARGE_BUCKET if on_gpu and self._hvd.nccl_built() else SMALL_BUCKET

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        with peer_failures():
            if not self._asynchronous:
                return [self._broadcast(tensor, name=f"{name}.{i}") for i, tensor in enumerate(tensors)]
            # Broadcast bytes (torch.uint8, without importing torch): Horovod does not support all dtypes.
            flat = [tensor.contiguous().reshape(-1).view(tensor.new_empty(0).byte().dtype) for tensor in tensors]
            handles = [
                self._hvd.broadcast_async(tensor, self._first, name=f"{name}.{i}", process_set=self._set)
                for i, tensor in enumerate(flat)
            ]
            received = [self._hvd.synchronize(handle) for handle in handles]
        return [new.view(old.dtype).reshape(old.shape) for new, old in zip(received, tensors, strict=True)]

    def gather_rows(
        self, tensors: Sequence[Tensor], *, name: str, lengths: Sequence[int] | None = None, narrow: Narrow | None = None
    ) -> list[Tensor]:
        sent = [self._sendable(tensor, narrow) for tensor in tensors]
        with peer_failures():
            gathered = [self._hvd.allgather(tensor, name=f"{name}.{i}", process_set=self._set) for i, tensor in enumerate(sent)]
        return [self._of_type(new, old.dtype) for new, old in zip(gathered, tensors, strict=True)]

    def gather(self, value: T, *, name: str) -> list[T]:
        if not self._asynchronous:
            more = {} if self._is_whole else {"process_set": self._set}
            with peer_failures():
                return list(self._hvd.allgather_object(value, name=name, **more))
        from hvdtrain.comm.torch_pickled import gather_pickled

        return gather_pickled(value, self.size, lambda tensor, _, of: self.gather_rows([tensor], name=f"{name}.{of}")[0])

    def send_to_first(self, value: T | None, source: int, *, name: str) -> T | None:
        values = self.gather(value if self.rank == source else None, name=name)
        return values[source] if self.rank == 0 else None

    def all_to_all(self, rows: Tensor, *, name: str) -> Any:
        self.sent += num_bytes([rows])
        with peer_failures():
            if not self._asynchronous:
                return [self._hvd.alltoall(rows, name=name, process_set=self._set)]
            return self._hvd.alltoall_async(rows, name=name, process_set=self._set), None, None

    def channel(self, name: str) -> HorovodCommunicator:
        return self  # Horovod matches operations by name, so their order does not matter

    def split(self, sets: Sequence[Sequence[int]], *, name: str) -> Communicator | None:
        registered = [tuple(ranks) for ranks in sets if 1 < len(ranks) < self.size]
        for members in registered:  # all ranks of the job register every set, once
            if members not in self._sets:
                self._sets[members] = self._register(members)
        ranks = next((tuple(ranks) for ranks in sets if self.rank in ranks), ())
        if ranks in self._sets:
            return HorovodCommunicator(self._hvd, self._stays, self._sets[ranks])
        if len(ranks) == 1:
            return SingleCommunicator(self.local_rank, self.local_size)
        return self if ranks else None

    def _register(self, ranks: Sequence[int]) -> Any:
        """Collective. Horovod's set of some ranks. Raises: LaunchError."""
        try:
            return self._hvd.add_process_set(list(ranks))
        except ValueError as error:
            raise LaunchError(
                f"horovod_param_group: expected Horovod to be initialized for groups of ranks, got: {error}"
            ).on_all_ranks() from None

    def close(self) -> None:
        self.gather(None, name="close")  # wait: when a rank exits with a status, a launcher ends the others, even in a callback
        if not self._stays:
            self._hvd.shutdown()
            return
        for process_set in self._sets.values():
            self._hvd.remove_process_set(process_set)

    def _sendable(self, tensor: Tensor, narrow: Narrow | None) -> Tensor:
        """A tensor in a form that Horovod can send: it supports neither bfloat16, which is sent as float32, nor, with PyTorch,
        complex numbers, which are sent as pairs, and tensors that are not contiguous.
        """
        if narrow == "float16" and "float32" in str(tensor.dtype):
            tensor = self._hvd.Compression.fp16.compress(tensor)[0]
        if not self._asynchronous:
            return tensor
        if tensor.is_complex():
            return tensor.contiguous().resolve_conj().unsqueeze(-1).view(tensor.real.dtype)
        return (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).contiguous()

    def _restore(self, reduced: Sequence[Tensor], tensors: Sequence[Tensor], divisor: int | None) -> list[Tensor]:
        """Convert reduced tensors to the types of the given ones; with PyTorch, in their memory."""
        restored = []
        for new, old in zip(reduced, tensors, strict=True):
            received = self._of_type(new, old.dtype)
            restored.append(old.copy_(received) if self._asynchronous and new.dtype != old.dtype else received)
        return restored if divisor is None else [tensor / divisor for tensor in restored]

    def _of_type(self, tensor: Tensor, dtype: Any) -> Tensor:
        if self._asynchronous and dtype.is_complex:
            return tensor.view(dtype).squeeze(-1)
        return tensor if tensor.dtype == dtype else self._hvd.Compression.fp16.decompress(tensor, dtype)

    def _broadcast(self, tensor: Tensor, *, name: str) -> Tensor:
        """Broadcast a TensorFlow tensor; dtypes that Horovod does not support are pickled as numpy arrays."""
        if tensor.dtype.name in SUPPORTED_DTYPES:
            return self._hvd.broadcast(tensor, self._first, name=name, process_set=self._set)
        return self._hvd.broadcast_object(tensor.numpy(), self._first, name=name, process_set=self._set)


@contextmanager
def _failures_while_connecting() -> Iterator[None]:
    """Under Horovod's elastic driver, a rank may be lost while the ranks connect: then the others reconnect."""
    try:
        yield
    except Exception as error:
        if this_process.launcher().restarts != "lost ranks":
            raise
        raise PeerFailure(f"stopped, because the ranks did not all connect: {error}") from None


def _writable(timeline: str, rank: int) -> str:
    """Return the path of the timeline; rank 0 checks that it is writable. Raises: LaunchError."""
    if rank == 0:
        try:
            Path(timeline).parent.mkdir(parents=True, exist_ok=True)
            Path(timeline).touch()
        except OSError as error:
            raise LaunchError(f"horovod_timeline: expected a writable file, got {timeline}: {error}") from None
    return timeline


@contextmanager
def peer_failures() -> Iterator[None]:
    """Translate Horovod's errors. A rank that failed reports its cause itself; the others end with PeerFailure."""
    try:
        yield
    except Exception as error:
        # A TensorFlow graph raises Horovod's error as UnknownError.
        if type(error).__name__ in ("HorovodInternalError", "UnknownError") and "Horovod has been shut down" in str(error):
            raise PeerFailure("stopped, because another rank failed") from None
        if "ncclCommInitRank failed: invalid usage" in str(error):
            raise LaunchError(
                f"use_horovod: {ONE_GPU_EACH} (start fewer processes on this host; if each has its own GPU, NCCL_DEBUG=WARN "
                "prints what else NCCL refuses)"
            ) from None
        raise
