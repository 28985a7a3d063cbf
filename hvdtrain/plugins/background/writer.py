"""Writes checkpoints in another process, while this one goes on.

torch.save holds Python's lock while it writes a tensor, so that steps would wait for a thread that writes. The tensors are copied
into memory that both processes share. The process is a fork of this one where that is safe, as a new one takes a second to import
torch, for which the second checkpoint may have to wait. It ends with this one; without it, the calling thread writes.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.comm import this_process
from hvdtrain.data.combine.workers import end_with
from hvdtrain.errors import STOP_SIGNALS
from hvdtrain.learner.contents import CheckpointContents, FileFormat
from hvdtrain.learner.torch.model_file import place_of

if TYPE_CHECKING:
    from hvdtrain.plugins.local_ranks.fork import Fork, ForkedProcess

ALIGNMENT = 64
"""The addresses of tensors are multiples of this number."""

NAME = "hvdtrain-saver"
"""The name of the process in /proc, ps and top."""

UNSHARED = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that are copied by value."""


@dataclass(frozen=True)
class Stored:
    """A tensor in shared memory."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def size(self) -> int:
        """In bytes."""
        return self.count * self.dtype.itemsize

    def in_memory(self, memory: mmap.mmap) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=self.dtype, count=self.count, offset=self.offset).view(self.shape)


def open_writer(may_fork: bool) -> BackgroundWriter:
    """As in the table `savers`."""
    if not may_fork:
        return BackgroundWriter()
    try:
        from hvdtrain.plugins.local_ranks.fork import fork
    except ModuleNotFoundError:  # its folder is deleted: the process is a new one
        return BackgroundWriter()
    return BackgroundWriter(fork(serve))


class BackgroundWriter:
    """Copies what a checkpoint holds, and writes the copy in another process. One copy exists at a time.

    Args:
        fork: the process, which has called `serve`; None: it is started when there is something to write.
    """

    def __init__(self, fork: Fork | None = None) -> None:
        self._file = -1
        self._memory: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None if fork is None else fork.process
        self._connection: Connection | None = None if fork is None else fork.connection
        self._is_shared = False  # whether the process has the memory

    def copy(self, contents: CheckpointContents) -> CheckpointContents:
        tensors: dict[Any, torch.Tensor] = {}
        _collect((contents.model, contents.optimizer), tensors)
        stored: dict[Any, Stored] = {}
        end = 0
        for place, tensor in tensors.items():
            stored[place] = Stored(end, tensor.dtype, tuple(tensor.shape))
            end += -(-stored[place].size // ALIGNMENT) * ALIGNMENT
        memory = self._with_space(end)
        for place, tensor in tensors.items():
            stored[place].in_memory(memory).copy_(tensor.detach())
        self._start()
        self._share()
        model, optimizer = _replace((contents.model, contents.optimizer), stored)
        written = contents.format
        remote = FileFormat(
            partial(self._call, written.write_model),
            partial(self._call, written.write),
            written.read_model,
            written.read,
        )
        return replace(contents, model=model, optimizer=optimizer, format=remote)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with suppress(ChildProcessError):  # code of the config has waited for any child
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
        self._process = self._connection = None
        self._is_shared = False

    def _with_space(self, size: int) -> mmap.mmap:
        """The shared memory, with at least this many bytes."""
        if self._memory is None or len(self._memory) < size:
            if self._file >= 0:
                os.close(self._file)
            self._memory = None
            self._is_shared = False
            self._file = os.memfd_create("hvdtrain-checkpoint")
            os.ftruncate(self._file, max(size, 1))
            self._memory = mmap.mmap(self._file, max(size, 1))
        return self._memory

    def _start(self) -> None:
        with suppress(ChildProcessError):
            if self._process is not None and self._process.poll() is None:
                return
        self.close()
        from multiprocessing import Pipe

        self._connection, child_end = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import Connection, serve; "
        code += f"serve(Connection({child_end.fileno()}), {os.getpid()})"
        with child_end, suppress(OSError):  # without memory for another process, the thread writes
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=this_process.environment(),
                pass_fds=[child_end.fileno()],
            )

    def _share(self) -> None:
        """Pass the memory to the process, if it does not have it."""
        if self._is_shared or self._process is None or self._connection is None or self._memory is None:
            return
        try:
            self._connection.send_bytes(pickle.dumps(len(self._memory)))
            send_handle(self._connection, self._file, self._process.pid)
            self._is_shared = True
        except OSError:  # it was killed; or else it would write what is in the memory before
            self.close()

    def _call(self, write: Callable[..., None], *arguments: Any) -> None:
        """Call a function that writes, in the process if it runs. Raises: OSError, RuntimeError."""
        connection = self._connection
        if connection is not None:
            with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # it was killed
                connection.send_bytes(pickle.dumps((write, arguments)))  # not `send`, by which torch shares tensors
                if (error := connection.recv()) is not None:
                    raise error
                return
        if self._memory is not None:
            write(*_in_memory(arguments, self._memory, {}))


def serve(connection: Connection, parent: int) -> None:
    """The other process: write what it is asked to, until its parent ends."""
    end_with(parent)  # a later start must not find it writing to the same files
    for number in STOP_SIGNALS:  # of the terminal, too: the training decides
        signal.signal(number, signal.SIG_IGN)
    this_process.put({"CUDA_VISIBLE_DEVICES": ""})
    Path("/proc/self/comm").write_text(NAME, encoding="utf-8")
    memory: mmap.mmap | None = None
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
            if isinstance(request, int):  # the size of the memory, whose file follows
                file = recv_handle(connection)
                memory = mmap.mmap(file, request)
                os.close(file)
                continue
        except (EOFError, OSError):
            break
        write, arguments = request
        error: Exception | None = None
        try:
            write(*_in_memory(arguments, memory, {}))
        except (OSError, RuntimeError) as raised:
            error = raised
        except Exception as raised:  # the training reports it as a failure to write
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        connection.send(error)


def _is_shared(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and tensor.layout == torch.strided and not tensor.is_quantized and tensor.dtype not in UNSHARED


def _collect(state: Any, tensors: dict[Any, torch.Tensor]) -> None:
    """Find the tensors in nested containers, each place in memory once."""
    if isinstance(state, torch.Tensor):
        if _is_shared(state):
            tensors.setdefault(place_of(state), state)
    elif isinstance(state, (Mapping, list, tuple)):
        for value in state.values() if isinstance(state, Mapping) else state:
            _collect(value, tensors)


def _replace(state: Any, stored: Mapping[Any, Stored]) -> Any:
    """Nested containers with `Stored` in place of the tensors, and copies of the few others."""
    if isinstance(state, torch.Tensor):
        return stored[place_of(state)] if _is_shared(state) else state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {key: _replace(value, stored) for key, value in state.items()}
    return type(state)(_replace(value, stored) for value in state) if isinstance(state, (list, tuple)) else state


def _in_memory(state: Any, memory: mmap.mmap | None, tensors: dict[int, torch.Tensor]) -> Any:
    """Nested containers with tensors in place of `Stored`; equal ones are the same tensor."""
    if isinstance(state, Stored):
        if memory is None:
            raise RuntimeError("expected the memory with the tensors before what is to be written")
        if state.offset not in tensors:
            tensors[state.offset] = state.in_memory(memory)
        return tensors[state.offset]
    if isinstance(state, dict):
        return {key: _in_memory(value, memory, tensors) for key, value in state.items()}
    return type(state)(_in_memory(value, memory, tensors) for value in state) if isinstance(state, (list, tuple)) else state
