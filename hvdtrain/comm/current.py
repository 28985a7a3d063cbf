"""Collectives for a config's own functions: `hvdtrain.run_on_main(...)` and `hvdtrain.all_reduce(...)`."""

from __future__ import annotations

import math
import numbers
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, SingleCommunicator, all_reduce, together
from hvdtrain.errors import ConfigError

T = TypeVar("T")

_connected: ContextVar[Communicator] = ContextVar("hvdtrain_communicator")


@contextmanager
def connected(comm: Communicator) -> Iterator[None]:
    """Make `comm` the communicator of the functions below within the `with` block."""
    token = _connected.set(comm)
    try:
        yield
    finally:
        _connected.reset(token)


def run_on_main(function: Callable[[], T], *, once_per: Literal["job", "host"] = "job") -> T:
    """Collective. Run a function in one process, such as to prepare data, while the others wait until it is done.

    Every rank has to call this, for example in `startup_callback` or `get_model`. If the function fails, all ranks end.

    Args:
        function: called without arguments; its return value has to be picklable.
        once_per: "job": only rank 0 calls the function. "host": one rank per host calls it, such as to write to local disks.

    Returns:
        The function's return value, on every rank; with once_per="host", its return value on the rank's own host.

    Raises:
        ConfigError: there are several processes, but they are not connected yet.
    """
    comm = _communicator("run_on_main")
    is_caller = comm.rank == 0 if once_per == "job" else comm.local_rank == 0
    result = together(comm, lambda: function() if is_caller else None, name="run_on_main")
    this_host = socket.gethostname()
    results = comm.gather((this_host, is_caller, result), name="run_on_main.value")
    return next(value for host, called, value in results if called and (once_per == "job" or host == this_host))  # type: ignore[return-value]  # a caller's value is a T


def reduce_values(value: T, op: Literal["sum", "average", "min", "max"] = "sum", *, name: str = "all_reduce") -> T:
    """Collective. Return the sum, average, minimum or maximum of a value over all ranks, such as for a custom metric.

    Every rank has to call this equally often and in the same order. Do not call it in `train_step`: in the last steps of an
    epoch some ranks may have no batch. An error marked with `mark_as_loss(..., as_error=True)` is reduced without this call.

    Args:
        value: a number (floats are summed exactly), a numpy array (reduced element by element), or a tensor of the job's
            framework ("sum" and "average" only); of the same shape on all ranks.
        name: the name of the operation in Horovod's timeline and stall report.

    Raises:
        ConfigError: as in `run_on_main`, or `op` is not supported for the value.
    """
    comm = _communicator("all_reduce")
    if op not in ("sum", "average", "min", "max"):
        raise ConfigError([f"all_reduce: expected 'sum', 'average', 'min' or 'max', got {op!r}"])
    if isinstance(value, numbers.Number):
        return _of_numbers(comm.gather(value, name=name), op)  # type: ignore[no-any-return]
    if type(value).__module__.partition(".")[0] == "numpy":
        return _of_arrays(comm.gather(value, name=name), op)  # type: ignore[no-any-return]
    if op == "sum" or op == "average":
        copied = value.detach().clone() if hasattr(value, "detach") else value
        return all_reduce(comm, [copied], op, name=name)[0]  # type: ignore[no-any-return]
    raise ConfigError([f"all_reduce: expected 'sum' or 'average' for a tensor, got {op!r} (numpy arrays support it)"])


def _of_numbers(values: list[Any], op: str) -> Any:
    if op in ("min", "max"):
        return min(values) if op == "min" else max(values)
    total = math.fsum(values) if any(isinstance(value, float) for value in values) else sum(values)
    return total if op == "sum" else total / len(values)


def _of_arrays(values: list[Any], op: str) -> Any:
    import numpy  # not at the top, to keep `import hvdtrain` in a config fast

    stacked = numpy.stack(values)
    return {"sum": numpy.sum, "average": numpy.mean, "min": numpy.min, "max": numpy.max}[op](stacked, axis=0)  # type: ignore[operator]


def _communicator(caller: str) -> Communicator:
    comm = _connected.get(None)
    if comm is not None:
        return comm
    started = launch.launch()
    if started.size > 1:
        raise ConfigError(
            [
                f"{caller}: expected a call after the {started.size} processes are connected, got one before "
                "(they are not connected while the config is read: call it in a function startup_callback(**_) of the config)"
            ]
        )
    return SingleCommunicator()
