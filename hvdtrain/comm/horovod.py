"""The communicator over Horovod: one class for its PyTorch and its TensorFlow binding."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hvdtrain.comm import launch
from hvdtrain.comm.base import (
    LARGE_BUCKET,
    SMALL_BUCKET,
    Communicator,
    Narrow,
    Op,
    SingleCommunicator,
    Tensor,
    num_bytes,
)
from hvdtrain.comm.horovod_gloo import gloo_environment
from hvdtrain.errors import LaunchError, PeerFailure

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


def open_horovod(framework: str, timeline: str | None = None, stays: bool = False) -> Communicator:
    """Initialize Horovod and connect the processes.

    A single process gets a SingleCommunicator: Horovod would cost it milliseconds per step.

    Args:
        framework: "torch" or "tensorflow".
        timeline: path of Horovod's timeline, which rank 0 writes.
        stays: the process may open Horovod again. As its shutdown finalizes MPI, which a process can initialize only once, it is
            left to the end of the process.

    Raises:
        LaunchError: Horovod is not installed for the framework, or does not connect the processes that the launcher started.
    """
    started = launch.launch()
    launch.yield_when_idle(started.local_size, launch.cores())
    if timeline is not None:
        launch.put({"HOROVOD_TIMELINE": _writable(timeline, started.rank)})
    try:
        launch.put(gloo_environment(launch.environment()))
        binding = importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise LaunchError(HOW_TO_INSTALL.format(error=error)) from None
    with _failures_while_connecting():
        binding.init()
    if binding.size() != started.size:
        raise LaunchError(
            f"use_horovod: expected the {started.size} processes that {started.launcher} started, got {binding.size()} from "
            f"Horovod ({HINTS.get(started.launcher or '', OTHER_HINT)})"
        )
    if binding.size() == 1:
        if not stays:
            binding.shutdown()
        return SingleCommunicator()
    return HorovodCommunicator(binding, stays)


class HorovodCommunicator:
    """The ranks of a Horovod job.

    The two bindings differ only in the asynchronous operations, which TensorFlow's does not have. The TensorFlow binding passes
    names on only within graphs: operations outside of them (parameters, scores) appear in Horovod's reports under the type of
    the operation, such as HorovodAllgather.
    """

    def __init__(self, binding: ModuleType, stays: bool = False) -> None:
        self._hvd: Any = binding
        self._stays = stays
        self._asynchronous = hasattr(binding, "grouped_allreduce_async_")
        self.sent = 0
        self.rank: int = binding.rank()
        self.size: int = binding.size()
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
                reduced = self._hvd.grouped_allreduce(sent, op=horovod_op, name=name)
                return self._restore(reduced, tensors, divisor)
            return self._hvd.grouped_allreduce_async_(sent, op=horovod_op, name=name), list(tensors), divisor

    def finish(self, handle: Any) -> list[Tensor]:
        if isinstance(handle, list):
            return handle
        number, tensors, divisor = handle
        with peer_failures():
            reduced = self._hvd.synchronize(number)
        return self._restore(reduced, tensors, divisor)

    def bucket_bytes(self, on_gpu: bool) -> int:
        return LARGE_BUCKET if on_gpu and self._hvd.nccl_built() else SMALL_BUCKET

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        with peer_failures():
            if not self._asynchronous:
                return [self._broadcast(tensor, name=f"{name}.{i}") for i, tensor in enumerate(tensors)]
            # Broadcast bytes (torch.uint8, without importing torch): Horovod does not support all dtypes.
            flat = [tensor.contiguous().reshape(-1).view(tensor.new_empty(0).byte().dtype) for tensor in tensors]
            handles = [self._hvd.broadcast_async(tensor, 0, name=f"{name}.{i}") for i, tensor in enumerate(flat)]
            received = [self._hvd.synchronize(handle) for handle in handles]
        return [new.view(old.dtype).reshape(old.shape) for new, old in zip(received, tensors, strict=True)]

    def gather_rows(
        self, tensors: Sequence[Tensor], *, name: str, lengths: Sequence[int] | None = None, narrow: Narrow | None = None
    ) -> list[Tensor]:
        sent = [self._sendable(tensor, narrow) for tensor in tensors]
        with peer_failures():
            gathered = [self._hvd.allgather(tensor, name=f"{name}.{i}") for i, tensor in enumerate(sent)]
        return [self._of_type(new, old.dtype) for new, old in zip(gathered, tensors, strict=True)]

    def gather(self, value: T, *, name: str) -> list[T]:
        with peer_failures():
            return list(self._hvd.allgather_object(value, name=name))

    def channel(self, name: str) -> HorovodCommunicator:
        return self  # Horovod matches operations by name, so their order does not matter

    def close(self) -> None:
        self.gather(None, name="close")  # wait: when a rank exits with a status, a launcher ends the others, even in a callback
        if not self._stays:
            self._hvd.shutdown()

    def _sendable(self, tensor: Tensor, narrow: Narrow | None) -> Tensor:
        """A tensor in a form that Horovod can send: it supports neither bfloat16, which is sent as float32, nor, with PyTorch,
        tensors that are not contiguous.
        """
        if narrow == "float16" and "float32" in str(tensor.dtype):
            tensor = self._hvd.Compression.fp16.compress(tensor)[0]
        if not self._asynchronous:
            return tensor
        return (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).contiguous()

    def _restore(self, reduced: Sequence[Tensor], tensors: Sequence[Tensor], divisor: int | None) -> list[Tensor]:
        """Convert reduced tensors to the types of the given ones; with PyTorch, in their memory."""
        restored = []
        for new, old in zip(reduced, tensors, strict=True):
            in_place = self._asynchronous and new.dtype != old.dtype
            restored.append(old.copy_(new) if in_place else self._of_type(new, old.dtype))
        return restored if divisor is None else [tensor / divisor for tensor in restored]

    def _of_type(self, tensor: Tensor, dtype: Any) -> Tensor:
        return tensor if tensor.dtype == dtype else self._hvd.Compression.fp16.decompress(tensor, dtype)

    def _broadcast(self, tensor: Tensor, *, name: str) -> Tensor:
        """Broadcast a TensorFlow tensor; dtypes that Horovod does not support are pickled as numpy arrays."""
        if tensor.dtype.name in SUPPORTED_DTYPES:
            return self._hvd.broadcast(tensor, 0, name=name)
        return self._hvd.broadcast_object(tensor.numpy(), 0, name=name)


@contextmanager
def _failures_while_connecting() -> Iterator[None]:
    """Under Horovod's elastic driver, a rank may be lost while the ranks connect: then the others reconnect."""
    try:
        yield
    except Exception as error:
        if launch.launcher().restarts != "lost ranks":
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
    """Translate Horovod's error into PeerFailure. The failing rank reports its cause itself."""
    try:
        yield
    except Exception as error:
        # A TensorFlow graph raises Horovod's error as UnknownError.
        if type(error).__name__ in ("HorovodInternalError", "UnknownError") and "Horovod has been shut down" in str(error):
            raise PeerFailure("stopped, because another rank failed") from None
        raise
