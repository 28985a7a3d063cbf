"""Sums and averages of values over all ranks: `hvdtrain.all_reduce(...)`."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any, Literal, TypeVar

import numpy

from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Tensor, all_reduce
from hvdtrain.comm.for_configs import communicator
from hvdtrain.errors import ConfigError

T = TypeVar("T")


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
    comm = communicator("all_reduce")
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
    compared = {"the operation": op, "the value": "a number" if is_number else _describe(value, is_array)}
    check_alike(comm, "all_reduce", compared, of=f"{name}: ")
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
