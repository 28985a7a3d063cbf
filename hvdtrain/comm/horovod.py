"""Horovod: its PyTorch and its TensorFlow binding behind one class."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, Op, SingleCommunicator, Tensor
from hvdtrain.comm.horovod_gloo import gloo_environment
from hvdtrain.errors import LaunchError, PeerFailure

T = TypeVar("T")

HOW_TO_INSTALL = (
    "use_horovod: expected an installed Horovod, got: {error}\n"
    "  Build it for the frameworks of this Python (two minutes; Open MPI first: apt-get install openmpi-bin libopenmpi-dev):\n"
    "    python -m hvdtrain build-horovod\n"
    "  Without Horovod, leave use_horovod out and start one process."
)


KNOWN_TYPES = ("uint8", "int32", "int64", "float16", "float32", "float64")
"""What Horovod can send from TensorFlow."""

HINTS = {
    "torchrun": 'torchrun is for torch.distributed: ++torch_distributed "{}" instead of use_horovod (or start it with mpirun)',
    "srun": "was Horovod built with MPI, and for the MPI that srun --mpi speaks to? Without --mpi=pmix, Gloo connects the tasks",
}
OTHER_HINT = (
    "was Horovod built for another MPI than the launcher's? Look at mpirun --version; "
    "python -m hvdtrain build-horovod --force builds it anew"
)


def open_horovod(framework: str, timeline: str | None = None) -> Communicator:
    """Start Horovod and connect the processes. One process alone needs no transport, which would cost it milliseconds a step.

    Args:
        timeline: a file for Horovod's timeline, written by rank 0.

    Raises:
        LaunchError: Horovod is not installed for the framework, or it sees other processes than the launcher started.
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
    binding.init()
    if binding.size() != started.size:
        raise LaunchError(
            f"use_horovod: expected the {started.size} processes that {started.launcher} started, got {binding.size()} from "
            f"Horovod ({HINTS.get(started.launcher or '', OTHER_HINT)})"
        )
    if binding.size() == 1:
        binding.shutdown()
        return SingleCommunicator()
    return HorovodCommunicator(binding)


class HorovodCommunicator:
    """The processes of a Horovod job. Horovod's two bindings are alike in everything used here but the asynchronous calls.

    TensorFlow hands names on inside of graphs only: what is exchanged outside of them (parameters, scores) appears under the
    operation's own name in Horovod's reports, such as HorovodAllgather.
    """

    def __init__(self, binding: ModuleType) -> None:
        self._hvd: Any = binding
        self._asynchronous = hasattr(binding, "grouped_allreduce_async_")
        self.rank: int = binding.rank()
        self.size: int = binding.size()
        self.local_rank: int = binding.local_rank()
        self.local_size: int = binding.local_size()

    def start(self, tensors: Sequence[Tensor], op: Op, *, name: str) -> Any:
        if not tensors:
            return []
        horovod_op = {"sum": self._hvd.Sum, "average": self._hvd.Average}[op]
        with peer_failures():
            if not self._asynchronous:
                return self._hvd.grouped_allreduce(list(tensors), op=horovod_op, name=name)
            # Horovod has no bfloat16: such tensors travel as float32. And it takes no transposed ones.
            wide = [(tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).contiguous() for tensor in tensors]
            handle = self._hvd.grouped_allreduce_async_(wide, op=horovod_op, name=name)
            return handle, [tensor.dtype for tensor in tensors]

    def finish(self, handle: Any) -> list[Tensor]:
        if isinstance(handle, list):
            return handle
        with peer_failures():
            reduced = self._hvd.synchronize(handle[0])
        return [tensor.to(dtype) for tensor, dtype in zip(reduced, handle[1], strict=True)]

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        with peer_failures():
            if not self._asynchronous:
                return [self._broadcast(tensor, name=f"{name}.{i}") for i, tensor in enumerate(tensors)]
            # As bytes: so every type can travel, those that Horovod does not know, too.
            flat = [tensor.contiguous().reshape(-1).view(_byte_type(tensor)) for tensor in tensors]
            handles = [self._hvd.broadcast_async(tensor, 0, name=f"{name}.{i}") for i, tensor in enumerate(flat)]
            sent = [self._hvd.synchronize(handle) for handle in handles]
        return [new.view(old.dtype).reshape(old.shape) for new, old in zip(sent, tensors, strict=True)]

    def gather_rows(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        with peer_failures():
            return [self._hvd.allgather(tensor, name=f"{name}.{i}") for i, tensor in enumerate(tensors)]

    def gather(self, value: T, *, name: str) -> list[T]:
        with peer_failures():
            return list(self._hvd.allgather_object(value, name=name))

    def channel(self, name: str) -> HorovodCommunicator:
        return self  # Horovod goes by the names, not by the order

    def close(self) -> None:
        self._hvd.shutdown()

    def _broadcast(self, tensor: Tensor, *, name: str) -> Tensor:
        """TensorFlow's; types that Horovod does not know travel as numpy arrays."""
        if tensor.dtype.name in KNOWN_TYPES:
            return self._hvd.broadcast(tensor, 0, name=name)
        return self._hvd.broadcast_object(tensor.numpy(), 0, name=name)


def _writable(timeline: str, rank: int) -> str:
    """The path of the timeline; rank 0 makes sure that it can be written. Raises: LaunchError."""
    if rank == 0:
        try:
            Path(timeline).parent.mkdir(parents=True, exist_ok=True)
            Path(timeline).touch()
        except OSError as error:
            raise LaunchError(f"horovod_timeline: expected a file that can be written, got {timeline}: {error}") from None
    return timeline


def _byte_type(tensor: Tensor) -> Any:
    """torch.uint8, without importing torch: only the binding does."""
    return tensor.new_empty(0).byte().dtype


@contextmanager
def peer_failures() -> Iterator[None]:
    """Horovod says one and the same thing whichever rank failed, and never why: the failing rank itself tells that."""
    try:
        yield
    except Exception as error:
        # A graph of TensorFlow wraps Horovod's error into one of its own.
        if type(error).__name__ in ("HorovodInternalError", "UnknownError") and "Horovod has been shut down" in str(error):
            raise PeerFailure("stopped, because another rank failed") from None
        raise
