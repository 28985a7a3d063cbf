"""torch.distributed, over Gloo or NCCL."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
import torch.distributed.nn.functional  # imported later, its functions' default arguments would keep the process group for ever
from torch._C._distributed_c10d import PrefixStore

from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, Op, SingleCommunicator, Tensor
from hvdtrain.comm.rendezvous import place
from hvdtrain.comm.torch_meeting import meet
from hvdtrain.errors import LaunchError, PeerFailure

T = TypeVar("T")

LONGEST_WAIT = 300.0
"""Seconds for which the processes wait for each other at the start, where timeout_sec does not say less."""

GONE = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "pair closure",
    "remote process",
    "recvValue",
)
"""Words in the errors of Gloo, NCCL and the store when another rank is no more."""

LATE = ("imed out", "imeout")


def open_torch_distributed(backend: str | None, init_method: str | None, timeout: float) -> Communicator:
    """Connect the processes that were started together. One process alone needs no transport.

    Args:
        backend: gloo, nccl, or both by kind of device; None: both where there are GPUs.
        init_method: where the processes meet; None: what the environment says.
        timeout: seconds after which a collective that waits for another rank fails.

    Raises:
        LaunchError: there is no such backend here, or the processes do not find each other.
    """
    started = launch.launch()
    if started.size == 1:
        return SingleCommunicator()
    chosen = _backend(backend)
    meeting_place = place(launch.environment(), started, init_method)
    if meeting_place is None and started.launcher != "mpirun":
        raise LaunchError(
            f"torch_distributed: expected to know where the {started.size} processes that {started.launcher} started meet, got "
            "no address (set MASTER_ADDR and MASTER_PORT, or init_method to 'tcp://HOST:PORT' or 'file:///PATH')"
        )
    store = meet(meeting_place, started.rank, started.size, min(timeout, LONGEST_WAIT))
    with _peer_failures():
        torch.distributed.init_process_group(
            chosen,
            store=PrefixStore("group", store),
            rank=started.rank,
            world_size=started.size,
            timeout=timedelta(seconds=timeout),
        )
        return TorchCommunicator(started)


class TorchCommunicator:
    """The processes of a torch.distributed job."""

    def __init__(self, started: launch.Launch, group: Any = None) -> None:
        self._group = group
        self._channels: list[TorchCommunicator] = []
        self._started = started
        self.rank: int = torch.distributed.get_rank()
        self.size: int = torch.distributed.get_world_size()
        hosts = self.gather((socket.gethostname(), started.local_size), name="hosts")
        if all(local_size == 1 for _, local_size in hosts):  # whoever started them by hand did not say who shares a host
            here = [rank for rank, (host, _) in enumerate(hosts) if host == hosts[self.rank][0]]
            self.local_rank: int = here.index(self.rank)
            self.local_size: int = len(here)
        else:
            self.local_rank, self.local_size = started.local_rank, started.local_size

    def start(self, tensors: Sequence[Tensor], op: Op, *, name: str) -> Any:
        """One message for each type and device: many small ones cost more than they carry."""
        parts: dict[tuple[Any, Any], list[int]] = {}
        for number, tensor in enumerate(tensors):
            parts.setdefault((tensor.dtype, tensor.device), []).append(number)
        pending = []
        for numbers in parts.values():
            flat = _flat([tensors[number] for number in numbers])
            with _peer_failures(), torch.autograd.profiler.record_function(f"all_reduce {name}"):
                pending.append((numbers, flat, torch.distributed.all_reduce(flat, group=self._group, async_op=True)))
        return list(tensors), op, pending

    def finish(self, handle: Any) -> list[Tensor]:
        tensors, op, pending = handle
        for numbers, flat, work in pending:
            with _peer_failures():
                work.wait()
            if op == "average":
                flat /= self.size
            pieces = flat.split([tensors[number].numel() for number in numbers])
            for number, piece in zip(numbers, pieces, strict=True):
                tensors[number] = piece.view(tensors[number].shape).to(tensors[number].dtype)
        return tensors  # type: ignore[no-any-return]

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        # As bytes: so every type can travel.
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8).clone() for tensor in tensors]
        with _peer_failures():
            for work in [torch.distributed.broadcast(tensor, 0, group=self._group, async_op=True) for tensor in flat]:
                work.wait()
        return [new.view(old.dtype).reshape(old.shape) for new, old in zip(flat, tensors, strict=True)]

    def gather_rows(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        gathered = []
        for tensor in tensors:
            count = torch.tensor([len(tensor)], device=tensor.device)
            counts = [torch.empty_like(count) for _ in range(self.size)]
            with _peer_failures():
                torch.distributed.all_gather(counts, count, group=self._group)
            lengths = [int(one) for one in counts]
            padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])  # every rank has to send equally much
            padded[: len(tensor)] = tensor
            parts = [torch.empty_like(padded) for _ in lengths]
            with _peer_failures():
                torch.distributed.all_gather(parts, padded, group=self._group)
            gathered.append(torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]))
        return gathered

    def gather(self, value: T, *, name: str) -> list[T]:
        gathered: list[Any] = [None] * self.size
        with _peer_failures():
            torch.distributed.all_gather_object(gathered, value, group=self._group)
        return gathered

    def channel(self, name: str) -> TorchCommunicator:
        with _peer_failures():
            self._channels.append(TorchCommunicator(self._started, torch.distributed.new_group(group_desc=name)))
        return self._channels[-1]

    def close(self) -> None:
        self.gather(None, name="close")  # rank 0 serves the store: it leaves when nobody needs it
        # Gloo's threads end with the last reference to their group. One that still lets go of a tensor when the interpreter
        # is gone takes the process down with SIGABRT.
        for one in (self, *self._channels):
            one._group = None
        torch.distributed.destroy_process_group()


def _flat(tensors: list[Tensor]) -> Tensor:
    """The tensors one after the other, in a tensor of their own unless there is only one; bfloat16 as float32, as Horovod
    has no bfloat16 either and sums should not differ.
    """
    flat = tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
    return flat.float() if flat.dtype == torch.bfloat16 else flat


def _backend(wanted: str | None) -> str:
    """What init_process_group is to be told. Values that are gathered travel over Gloo in any case."""
    if wanted is None:
        wanted = "nccl" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "gloo"
    if "nccl" not in wanted:
        return wanted
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        missing = "a GPU" if torch.distributed.is_nccl_available() else "a PyTorch that was built with NCCL"
        raise LaunchError(f"torch_distributed.backend: expected {missing} on this host for {wanted!r}, got none (use 'gloo')")
    return "cpu:gloo,cuda:nccl"


@contextmanager
def _peer_failures() -> Iterator[None]:
    """Gloo and NCCL name sockets, not ranks: the failing rank itself tells why."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "Duplicate GPU" in text:
            raise LaunchError(
                "torch_distributed: expected a GPU of its own for every process, got two processes on one, which NCCL refuses "
                "(start fewer processes on this host, or take the backend 'gloo')"
            ) from None
        if any(words in text for words in LATE):
            raise PeerFailure("stopped, because another rank did not come within timeout_sec of torch_distributed") from None
        if any(words in text for words in GONE):
            raise PeerFailure("stopped, because another rank failed") from None
        raise
