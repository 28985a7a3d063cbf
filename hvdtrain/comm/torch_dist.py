"""The communicator over torch.distributed, with Gloo or NCCL."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
import torch.distributed.nn.functional  # if imported later, its default arguments would keep a reference to the process group
from torch._C._distributed_c10d import PrefixStore
from torch._utils import _flatten_dense_tensors as flatten_dense_tensors
from torch._utils import _unflatten_dense_tensors as unflatten_dense_tensors

from hvdtrain.comm import this_process
from hvdtrain.comm.base import LARGE_BUCKET, ONE_GPU_EACH, SMALL_BUCKET, Communicator, Narrow, Op, Tensor
from hvdtrain.comm.launchers import Place
from hvdtrain.comm.meeting_point import meeting_point
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.comm.torch_pickled import gather_pickled
from hvdtrain.comm.torch_rendezvous import meet
from hvdtrain.errors import HvdtrainError, LaunchError, PeerFailure, TrainingError

T = TypeVar("T")

NO_RANGE = nullcontext()

HALVES = (torch.float16, torch.bfloat16)

MAX_START_TIMEOUT = 300.0
"""The maximum seconds that processes wait for each other at the start; timeout_sec, if that is less."""

PEER_GONE = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "pair closure",
    "remote process",
    "recvValue",
)
"""Substrings of the errors that Gloo, NCCL and the store raise when another rank has ended."""

PEER_LATE = ("imed out", "imeout")
"""Substrings of their errors when a collective times out."""


def open_torch_distributed(backend: str | None, init_method: str | None, timeout: float, stays: bool = False) -> Communicator:
    """Connect the processes of the job. A single process gets a SingleCommunicator.

    Args:
        backend: gloo, nccl, or both by device; None: both if there are GPUs.
        init_method: the rendezvous address; None: from the environment.
        timeout: seconds after which a collective that waits for another rank fails.
        stays: the process may connect again. All its ranks then keep the store at which they have met.

    Raises:
        LaunchError: the backend is not available, or the processes cannot connect.
    """
    place = this_process.place()
    if place.size == 1:
        return SingleCommunicator()
    backend = _choose_backend(backend)
    meeting_place = meeting_point(this_process.environment(), place, init_method)
    if meeting_place is None and place.launcher != "mpirun":
        raise LaunchError(
            f"torch_distributed: expected a rendezvous address for the {place.size} processes that {place.launcher} started, "
            "got none (set MASTER_ADDR and MASTER_PORT, or init_method to 'tcp://HOST:PORT' or 'file:///PATH')"
        )
    with _peer_failures():
        on_one_host = place.local_size == place.size
        patience = min(timeout, MAX_START_TIMEOUT)
        store = meet(meeting_place, place.rank, place.size, patience, on_one_host, stays=stays)
        torch.distributed.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout),
        )
        return TorchCommunicator(place, timedelta(seconds=timeout))


@contextmanager
def leaving() -> Iterator[None]:
    """Leave the process group if an error that only this rank has ends the `with` block, so that it can connect again.

    Gloo's destructor waits for the operations under way, and so for other ranks: a thread does.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, HvdtrainError) or not error.on_every_rank:
            groups = list(torch.distributed.distributed_c10d._world.pg_map)
            torch.distributed.destroy_process_group()
            threading.Thread(target=groups.clear, name="leaving the ranks", daemon=True).start()
        raise


class TorchCommunicator:
    """The ranks of a torch.distributed job, or some of them.

    Args:
        timeout: after which a collective that waits for another rank fails.
        group: the process group; None: that of the job.
    """

    def __init__(self, place: Place, timeout: timedelta, group: Any = None) -> None:
        self._group = group
        self._channels: list[TorchCommunicator] = []
        self._place = place
        self._timeout = timeout
        self._has_nccl = "nccl" in torch.distributed.get_backend_config(group)
        self.sent = 0
        self.transport = f"torch.distributed over {'NCCL' if self._has_nccl else 'Gloo'}"
        self.rank: int = torch.distributed.get_rank(group)
        self.size: int = torch.distributed.get_world_size(group)
        self._members = list(range(self.size)) if group is None else torch.distributed.get_process_group_ranks(group)
        hosts = self.gather((socket.gethostname(), place.local_size), name="hosts")
        if all(local_size == 1 for _, local_size in hosts):  # processes started by hand do not know their local rank
            on_host = [rank for rank, (host, _) in enumerate(hosts) if host == hosts[self.rank][0]]
            self.local_rank: int = on_host.index(self.rank)
            self.local_size: int = len(on_host)
        else:
            self.local_rank, self.local_size = place.local_rank, place.local_size

    def start(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        *,
        name: str,
        owners: Sequence[int] | None = None,
        narrow: Narrow | None = None,
    ) -> Any:
        """Start one operation per dtype and device, since many small ones are slower than one large one."""
        groups: dict[tuple[Any, Any], list[int]] = {}
        for index, tensor in enumerate(tensors):
            groups.setdefault((tensor.dtype, tensor.device), []).append(index)
        is_profiled = torch._C._autograd._profiler_enabled()  # a range takes as long as a small message
        pending = []
        for indices in groups.values():
            shares: list[int] | None = None
            received = indices
            if owners is not None:
                indices = sorted(indices, key=owners.__getitem__)
                shares = [0] * self.size
                for index in indices:
                    shares[owners[index]] += tensors[index].numel()
                received = [index for index in indices if owners[index] == self.rank]
            flat = self._flatten([tensors[index] for index in indices], narrow)
            self.sent += flat.nbytes
            with torch.autograd.profiler.record_function(f"all_reduce {name}") if is_profiled else NO_RANGE:
                pending.append((received, *self._exchange(flat, shares)))
        return list(tensors), op, pending

    def finish(self, handle: Any) -> list[Tensor]:
        tensors, op, pending = handle
        for indices, received, _, work in pending:
            try:
                work.wait()
            except RuntimeError as error:
                raise _translate_error(error) from None
            wide = received.float() if received.dtype in HALVES else received
            if wide.dim() == 2:
                wide = wide.sum(0, dtype=wide.dtype)
            if op == "average":
                wide /= self.size
            sent = [tensors[index] for index in indices]
            pieces = unflatten_dense_tensors(wide, sent)  # type: ignore[no-untyped-call]
            for index, tensor, piece in zip(indices, sent, pieces, strict=True):
                tensors[index] = piece if piece.dtype == tensor.dtype else piece.to(tensor.dtype)
        return tensors  # type: ignore[no-any-return]

    def bucket_bytes(self, on_gpu: bool) -> int:
        return LARGE_BUCKET if on_gpu and self._has_nccl else SMALL_BUCKET

    def _exchange(self, flat: Tensor, shares: list[int] | None) -> tuple[Tensor, Tensor, Any]:
        """Start to sum a tensor over the ranks; return the tensor for the result, one to keep alive until then, and the work.

        Args:
            shares: the number of elements that each rank gets; None: all get all. With shares, each rank sends every part to its
                owner, which sums them: torch's reduce_scatter requires equal parts, and over Gloo it is an all-reduce internally.
        """
        try:
            if shares is None:
                group: Any = torch.distributed.group.WORLD if self._group is None else self._group
                return flat, flat, group.allreduce([flat])  # that of torch.distributed is several times as many calls
            received = flat.new_empty(self.size, shares[self.rank])
            out = [shares[self.rank]] * self.size
            work = torch.distributed.all_to_all_single(received.view(-1), flat, out, shares, self._group, async_op=True)
            return received, flat, work
        except RuntimeError as error:
            raise _translate_error(error) from None

    def _flatten(self, tensors: list[Tensor], narrow: Narrow | None) -> Tensor:
        """Concatenate the flattened tensors, in the type in which they are sent; a single tensor is not copied.

        bfloat16 is sent as it is over NCCL only; otherwise as float32, so that sums are the same as with Horovod, which does not
        support bfloat16.
        """
        flat = flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        if flat.dtype == torch.bfloat16 and not (flat.is_cuda and self._has_nccl):
            return flat.float()
        return _narrow(flat, narrow)

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        # Broadcast bytes, so that every dtype works.
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8).clone() for tensor in tensors]
        with _peer_failures():
            first = self._members[0]
            for work in [torch.distributed.broadcast(tensor, first, group=self._group, async_op=True) for tensor in flat]:
                work.wait()
        return [new.view(old.dtype).reshape(old.shape) for new, old in zip(flat, tensors, strict=True)]

    def gather_rows(
        self, tensors: Sequence[Tensor], *, name: str, lengths: Sequence[int] | None = None, narrow: Narrow | None = None
    ) -> list[Tensor]:
        return [self._gather_rows(tensor, lengths, narrow) for tensor in tensors]

    def _gather_rows(self, tensor: Tensor, lengths: Sequence[int] | None, narrow: Narrow | None) -> Tensor:
        if lengths is None:
            count = torch.tensor([len(tensor)], device=tensor.device)
            counts = [torch.empty_like(count) for _ in range(self.size)]
            with _peer_failures():
                torch.distributed.all_gather(counts, count, group=self._group)
            lengths = [int(length) for length in counts]
        sent = _narrow(tensor, narrow)
        if any(length != lengths[0] for length in lengths):
            sent = sent.new_zeros(max(lengths), *tensor.shape[1:])  # all_gather needs the same shape on every rank
            sent[: len(tensor)] = tensor
        received = [torch.empty_like(sent) for _ in lengths]
        with _peer_failures():
            torch.distributed.all_gather(received, sent, group=self._group)
        return torch.cat([rows[:length] for rows, length in zip(received, lengths, strict=True)]).to(tensor.dtype)

    def gather(self, value: T, *, name: str) -> list[T]:
        gathered = gather_pickled((name, value), self.size, lambda tensor, lengths, _: self._gather_rows(tensor, lengths, None))
        calls = [call for call, _ in gathered]
        if different := [rank for rank, call in enumerate(calls) if call != calls[0]]:
            raise _mismatched_calls(calls[0], calls[different[0]], different[0])
        return [value for _, value in gathered]

    def send_to_first(self, value: T | None, source: int, *, name: str) -> T | None:
        if source == 0 or self.rank not in (0, source):
            return value if self.rank == 0 else None
        with _peer_failures():
            if self.rank == 0:
                [length] = self._received(source, torch.empty(1, dtype=torch.int64)).tolist()
                sent: T = pickle.loads(self._received(source, torch.empty(length, dtype=torch.uint8)).numpy().data)
                return sent
            data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            for tensor in (torch.tensor([len(data)]), data):
                torch.distributed.send(tensor, self._members[0], group=self._group)
            return None

    def _received(self, source: int, tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.recv(tensor, self._members[source], group=self._group)
        return tensor

    def all_to_all(self, rows: Tensor, *, name: str) -> Any:
        self.sent += rows.nbytes
        flat = rows.reshape(-1)
        received = torch.empty_like(flat)
        with _peer_failures(), torch.autograd.profiler.record_function(f"all_to_all {name}"):
            work = torch.distributed.all_to_all_single(received, flat, group=self._group, async_op=True)
        return [rows], "sum", [([0], received, flat, work)]

    def channel(self, name: str) -> TorchCommunicator:
        self._check_whole(f"channel {name}")
        with _peer_failures():
            self._channels.append(self._within_group(torch.distributed.new_group(timeout=self._timeout, group_desc=name)))
        return self._channels[-1]

    def split(self, sets: Sequence[Sequence[int]], *, name: str) -> Communicator | None:
        self._check_whole(f"split {name}")
        members: Communicator | None = None
        for ranks in sets:
            if len(ranks) == self.size:
                members = self
            elif len(ranks) == 1:
                members = SingleCommunicator(self.local_rank, self.local_size) if self.rank in ranks else members
            elif ranks:
                with _peer_failures():
                    group = torch.distributed.new_group(list(ranks), self._timeout, group_desc=name)
                if self.rank in ranks:
                    self._channels.append(self._within_group(group))
                    members = self._channels[-1]
        return members

    def _check_whole(self, method: str) -> None:
        if self._group is not None:
            raise RuntimeError(f"{method}: PyTorch makes groups on all ranks of a job, not on a part of them")

    def _within_group(self, group: Any) -> TorchCommunicator:
        return TorchCommunicator(self._place, self._timeout, group)

    def close(self) -> None:
        self.gather(None, name="close")  # rank 0 serves the store, so it must not end before the others
        # Gloo's threads end with the last reference to their group. A thread that frees a tensor after the interpreter has shut
        # down would abort the process (SIGABRT).
        for comm in (self, *self._channels):
            comm._group = None
        torch.distributed.destroy_process_group()


def _mismatched_calls(first: str, theirs: str, rank: int) -> TrainingError:
    """Unlike Horovod, torch.distributed matches calls by order: without this check, a rank could get another call's result."""
    return TrainingError(
        f"collective calls: expected the same on all ranks, got {first!r} on rank 0 and {theirs!r} on rank {rank} "
        "(does code of the config call hvdtrain.all_reduce or the like on some of the ranks only, or do their configs differ?)"
    )


def _narrow(tensor: Tensor, narrow: Narrow | None) -> Tensor:
    """Convert a float32 tensor to the type in which it is sent; others are not changed."""
    return tensor.to(getattr(torch, narrow)) if tensor.dtype == torch.float32 and narrow is not None else tensor


def _choose_backend(wanted: str | None) -> str:
    """The backend for init_process_group. It always includes Gloo, to gather picklable values."""
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
    """Translate errors of Gloo and NCCL, which name sockets instead of ranks. The failing rank reports its cause itself."""
    try:
        yield
    except RuntimeError as error:
        raise _translate_error(error) from None


def _translate_error(error: RuntimeError) -> Exception:
    """The error to raise in place of one of Gloo or NCCL; itself, if it has another cause."""
    text = str(error)
    if "Duplicate GPU" in text:
        return LaunchError(f"torch_distributed: {ONE_GPU_EACH} (start fewer processes on this host, or use the backend 'gloo')")
    if any(words in text for words in PEER_LATE):
        return PeerFailure("stopped, because another rank did not respond within timeout_sec of torch_distributed")
    if isinstance(error, torch.distributed.DistNetworkError) or any(words in text for words in PEER_GONE):
        return PeerFailure("stopped, because another rank failed")
    return error
