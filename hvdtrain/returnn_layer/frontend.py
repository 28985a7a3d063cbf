"""`returnn.frontend`: the run context, and the few functions by which configs of plain PyTorch count their losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.returnn_layer.run_ctx import RunCtx, get_run_ctx, mask_of
from hvdtrain.returnn_layer.templates import TensorDict
from hvdtrain.returnn_layer.tensors import Dim, Tensor, batch_dim

__all__ = [
    "Dim", "RunCtx", "Tensor", "TensorDict", "batch_dim", "cast", "convert_to_tensor", "copy_to_device",
    "get_default_float_dtype", "get_run_ctx", "get_run_ctx_step", "reduce_max", "reduce_mean", "reduce_min", "reduce_sum",
]  # fmt: skip


def get_run_ctx_step() -> Tensor:
    """The number of steps done in the whole training before this one, as a scalar."""
    return get_run_ctx().get_step_tensor()


def get_default_float_dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def convert_to_tensor(
    value: Any, *, dims: Sequence[Dim] = (), name: str = "tensor", dtype: str | None = None, **_: Any
) -> Tensor:
    """A raw tensor, an array or a number as a Tensor with these axes."""
    if isinstance(value, Tensor):
        return value
    raw = torch.as_tensor(value)
    return Tensor(name, list(dims), raw_tensor=raw if dtype is None else raw.to(getattr(torch, dtype)))


def cast(tensor: Tensor, dtype: str) -> Tensor:
    """The same numbers in another type."""
    return Tensor(tensor.name, tensor.dims, raw_tensor=tensor.raw_tensor.to(getattr(torch, dtype)), sparse_dim=tensor.sparse_dim)


def copy_to_device(tensor: Tensor, device: Any = None) -> Tensor:
    """The same numbers on a device."""
    return tensor if device is None else tensor.to(device)


def reduce_sum(source: Tensor, *, axis: Dim | Sequence[Dim]) -> Tensor:
    """The sum over some axes, without padding."""
    return _reduced(source, axis, "sum", 0)


def reduce_mean(source: Tensor, *, axis: Dim | Sequence[Dim]) -> Tensor:
    """The mean over some axes, without padding."""
    ones = Tensor(source.name, source.dims, raw_tensor=torch.ones_like(source.raw_tensor))
    return reduce_sum(source, axis=axis) / reduce_sum(ones, axis=axis)


def reduce_max(source: Tensor, *, axis: Dim | Sequence[Dim]) -> Tensor:
    """The largest over some axes, without padding."""
    return _reduced(source, axis, "amax", _limits(source.raw_tensor.dtype).min)


def reduce_min(source: Tensor, *, axis: Dim | Sequence[Dim]) -> Tensor:
    """The smallest over some axes, without padding."""
    return _reduced(source, axis, "amin", _limits(source.raw_tensor.dtype).max)


def _reduced(source: Tensor, axis: Dim | Sequence[Dim], operation: str, neutral: float) -> Tensor:
    over = [axis] if isinstance(axis, Dim) else list(axis)
    foreign = [dim for dim in over if dim not in source.dims]
    if foreign:
        raise ValueError(f"{source}: expected axes out of {list(source.dims)} to reduce, got {foreign}")
    mask = mask_of(source)
    raw = source.raw_tensor if mask is None else source.raw_tensor.masked_fill(~mask, neutral)
    left = [dim for dim in source.dims if dim not in over]
    axes = [source.dims.index(dim) for dim in over]
    return Tensor(source.name, left, raw_tensor=getattr(raw, operation)(axes) if axes else raw)


def _limits(dtype: torch.dtype) -> Any:
    return torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
