"""What a config may ask of the ranks: `hvdtrain.run_on_main(...)`, `hvdtrain.all_reduce(...)` and
`hvdtrain.all_gather(...)`."""

from __future__ import annotations

import math
import numbers
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

from hvdtrain.comm import this_process
from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, Tensor, all_reduce, gather_together
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.errors import ConfigError

T = TypeVar("T")

_current: ContextVar[Communicator] = ContextVar("hvdtrain_communicator")


@contextmanager
def use_communicator(comm: Communicator) -> Iterator[None]:
    """Make `comm` the communicator of `run_on_main` and `reduce_values` within the `with` block."""
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
    comm = _communicator("run_on_main")
    is_caller = comm.rank == 0 if once_per == "job" else comm.local_rank == 0
    this_host = socket.gethostname()

    def call() -> tuple[str, bool, T | None]:
        return this_host, is_caller, function() if is_caller else None

    results = gather_together(comm, call, name="run_on_main")
    return next(value for host, called, value in results if called and (once_per == "job" or host == this_host))  # type: ignore[return-value]  # a caller's value is a T


def gather_values(value: T, *, name: str = "all_gather") -> list[T]:
    """Collective. Return the values of all ranks, on every rank, in the order of the ranks.

    Where it may be called, and what it raises, is as of `reduce_values`.

    Args:
        value: anything that can be pickled; tensors have to be on the CPU.
        name: as of `reduce_values`.
    """
    return _communicator("all_gather").gather(value, name=name)


def reduce_values(value: T, op: Literal["sum", "average", "min", "max"] = "sum", *, name: str = "all_reduce") -> T:
    """Collective. Return the sum, average, minimum or maximum of a value over all ranks, for example of a custom metric.

    Every rank has to call this equally often and in the same order. Do not call it in `train_step`: in the last steps of an
    epoch some ranks may have no batch. An error marked with `mark_as_loss(..., as_error=True)` is reduced without this call.

    Args:
        value: a number (summed exactly, whatever its type), a numpy array (reduced element by element; floats are added up in 64
            bits), or a tensor of the job's framework ("sum" and "average" only); of the same shape on all ranks. Sums of integers
            in arrays and tensors are 64-bit integers, and their averages are 64-bit floats.
        name: the name of the operation in Horovod's timeline and stall report.

    Raises:
        ConfigError: as in `run_on_main`, `op` or the value is not supported, or the ranks reduce different things.
    """
    comm = _communicator("all_reduce")
    if op not in ("sum", "average", "min", "max"):
        raise ConfigError.of("unknown-value", f"all_reduce: expected 'sum', 'average', 'min' or 'max', got {op!r}")
    is_number = isinstance(value, numbers.Number)
    is_array = type(value).__module__.partition(".")[0] == "numpy"
    if not is_number and not hasattr(value, "dtype"):
        raise ConfigError.of("wrong-type", f"all_reduce: expected a number, a numpy array or a tensor, got {value!r}")
    if not is_number and not is_array and op not in ("sum", "average"):
        raise ConfigError.of(
            "unknown-value", f"all_reduce: expected 'sum' or 'average' for a tensor, got {op!r} (numpy arrays support it)"
        )
    what = {"the operation": op, "the value": "a number" if is_number else _describe(value, is_array)}
    check_alike(comm, "all_reduce", what, of=f"{name}: ")
    if is_number:
        return _reduce_numbers(comm.gather(value, name=name), op)  # type: ignore[no-any-return]
    if is_array:
        return _reduce_arrays(comm.gather(value, name=name), op)  # type: ignore[no-any-return]
    return all_reduce(comm, [_wide_copy(value, op)], op, name=name)[0]  # type: ignore[arg-type,no-any-return]


def _describe(value: Any, is_array: bool) -> str:
    shape = tuple(value.shape)
    return f"an array of shape {shape}" if is_array else f"a tensor of {value.dtype}, shape {shape}"


def _reduce_numbers(values: list[Any], op: str) -> Any:
    if op in ("min", "max"):
        return min(values) if op == "min" else max(values)
    if all(isinstance(value, numbers.Integral) for value in values):
        total: Any = sum(map(int, values))  # numpy's integers would overflow
    else:
        try:
            total = math.fsum(values)
        except (ValueError, OverflowError, TypeError):  # infinities of both signs, a sum that is too large, complex numbers
            total = sum(values)
    return total if op == "sum" else total / len(values)


def _reduce_arrays(values: list[Any], op: str) -> Any:
    import numpy  # not at the top, to keep `import hvdtrain` in a config fast

    stacked = numpy.stack(values)
    if op in ("min", "max"):
        return (numpy.min if op == "min" else numpy.max)(stacked, axis=0)
    is_float = stacked.dtype.kind == "f"
    reduced = (numpy.sum if op == "sum" else numpy.mean)(stacked, axis=0, dtype="float64" if is_float else None)
    return reduced.astype(stacked.dtype) if is_float else reduced


def _wide_copy(tensor: Tensor, op: str) -> Tensor:
    """A copy that may be overwritten: an integer one in a type whose sum does not overflow, or that can be divided."""
    is_integer = "int" in str(tensor.dtype) or "bool" in str(tensor.dtype)
    if hasattr(tensor, "detach"):
        copied = tensor.detach().clone()
        return copied if not is_integer else copied.long() if op == "sum" else copied.double()
    return sys.modules["tensorflow"].cast(tensor, "int64" if op == "sum" else "float64") if is_integer else tensor


def _communicator(caller: str) -> Communicator:
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
