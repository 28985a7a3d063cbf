"""What a config may ask of the ranks: `hvdtrain.run_on_main(...)` and `hvdtrain.all_gather(...)`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TypeVar

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator, gather_together
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.errors import ConfigError

T = TypeVar("T")

_current: ContextVar[Communicator] = ContextVar("hvdtrain_communicator")


@contextmanager
def use_communicator(comm: Communicator) -> Iterator[None]:
    """Make `comm` the communicator of these functions within the `with` block."""
    token = _current.set(comm)
    try:
        yield
    finally:
        _current.reset(token)


def run_on_main(function: Callable[[], T], *, once_per: Literal["job", "host"] = "job") -> T:
    """Collective. Run a function in one process, for example to prepare data, while the others wait for it.

    Every rank has to call this, for example in `startup_callback` or `get_model`. If the function fails, all ranks end.

    Args:
        function: called without arguments; its return value has to be picklable.
        once_per: "job": only rank 0 calls the function. "host": one rank per host calls it, for example to write to local disks.

    Returns:
        The function's return value, on every rank; with once_per="host", its return value on the rank's own host.

    Raises:
        ConfigError: there are several processes, but they are not connected yet.
    """
    comm = communicator("run_on_main")
    is_caller = comm.rank == 0 if once_per == "job" else comm.local_rank == 0
    this_host = socket.gethostname()

    def call() -> tuple[str, bool, T | None]:
        return this_host, is_caller, function() if is_caller else None

    results = gather_together(comm, call, name="run_on_main")
    return next(value for host, called, value in results if called and (once_per == "job" or host == this_host))  # type: ignore[return-value]  # a caller's value is a T


def gather_values(value: T, *, name: str = "all_gather") -> list[T]:
    """Collective. Return the values of all ranks, on every rank, in the order of the ranks.

    Every rank has to call this equally often and in the same order. Do not call it in `train_step`: in the last steps of an
    epoch some ranks may have no batch.

    Args:
        value: anything that can be pickled; tensors have to be on the CPU.
        name: the name of the operation in Horovod's timeline and stall report.

    Raises:
        ConfigError: as in `run_on_main`.
    """
    return communicator("all_gather").gather(value, name=name)


def communicator(caller: str) -> Communicator:
    """The ranks of the job.

    Args:
        caller: the name of the function that asks for them.

    Raises:
        ConfigError: there are several processes, but they are not connected yet.
    """
    comm = _current.get(None)
    if comm is not None:
        return comm
    place = this_process.place()
    if place.size > 1:
        raise ConfigError.of(
            "wrong-call",
            f"{caller}: expected a call after the {place.size} processes are connected, got one before "
            "(they are not connected while the config is read: call it in a function startup_callback(**_) of the config)",
        )
    return SingleCommunicator()
