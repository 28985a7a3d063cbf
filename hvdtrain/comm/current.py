"""The ranks as a config's own functions see them: `hvdtrain.run_on_main(...)`, `hvdtrain.all_reduce(...)`."""

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
    """Make `comm` what the functions below speak through inside the `with` block."""
    token = _connected.set(comm)
    try:
        yield
    finally:
        _connected.reset(token)


def run_on_main(function: Callable[[], T], *, once_per: Literal["job", "host"] = "job") -> T:
    """Collective. Let one process do something, such as preparing data, while the others wait until it is done.

    Every rank calls this, in `startup_callback` or `get_model` for example. Where the function fails, all ranks end.

    Args:
        function: called without arguments; what it returns has to be picklable.
        once_per: "job": rank 0 calls it. "host": one rank of every host does, which is for what goes to local disks.

    Returns: what the function returned, on every rank; once per host, what it returned on the rank's own host.

    Raises:
        ConfigError: called outside of a training on several ranks, where they are not connected yet.
    """
    comm = _communicator("run_on_main")
    does_it = comm.rank == 0 if once_per == "job" else comm.local_rank == 0
    mine = together(comm, lambda: function() if does_it else None, name="run_on_main")
    everybody = comm.gather((socket.gethostname(), does_it, mine), name="run_on_main.value")
    here = socket.gethostname()
    return next(value for host, did_it, value in everybody if did_it and (once_per == "job" or host == here))  # type: ignore[return-value]  # who did it has a T


def reduce_values(value: T, op: Literal["sum", "average", "min", "max"] = "sum", *, name: str = "all_reduce") -> T:
    """Collective. The sum, average, smallest or largest of a value over all ranks; for a metric of one's own.

    Every rank has to call this, equally often and in the same order. In `train_step` that is not so: in the last steps of an
    epoch some ranks have no batch. What is marked with `mark_as_loss(..., as_error=True)` needs no such call.

    Args:
        value: a number (floats are summed exactly), a numpy array (element by element), or a tensor of the job's framework
            ("sum" and "average" only); of the same shape on all ranks.
        name: what the call is called in Horovod's timeline and stall report.

    Raises:
        ConfigError: as `run_on_main`; or the op is none of those.
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
    raise ConfigError([f"all_reduce: expected 'sum' or 'average' for a tensor, got {op!r} (a numpy array can have it)"])


def _of_numbers(values: list[Any], op: str) -> Any:
    if op in ("min", "max"):
        return min(values) if op == "min" else max(values)
    total = math.fsum(values) if any(isinstance(value, float) for value in values) else sum(values)
    return total if op == "sum" else total / len(values)


def _of_arrays(values: list[Any], op: str) -> Any:
    import numpy  # here, so that a config that imports hvdtrain need not wait for it

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
                f"{caller}: expected to be called when the {started.size} processes are connected, got called before "
                "(while the config is read they are not yet: call it in a function startup_callback(**_) of the config)"
            ]
        )
    return SingleCommunicator()
