"""`returnn.frontend`: RETURNN's run context, on top of hvdtrain's, and the few functions with which configs for plain PyTorch
compute losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

from hvdtrain.context import RunContext
from hvdtrain.errors import ConfigError
from hvdtrain.returnn_layer.imports import not_in_layer
from hvdtrain.returnn_layer.templates import TensorDict
from hvdtrain.returnn_layer.tensors import Dim, Tensor, batch_dim

__all__ = [
    "Dim", "RunCtx", "Tensor", "TensorDict", "batch_dim", "cast", "convert_to_tensor", "copy_to_device",
    "get_default_float_dtype", "get_run_ctx", "get_run_ctx_step", "reduce_max", "reduce_mean", "reduce_min", "reduce_sum",
]  # fmt: skip

Stage = Literal["init", "train_step", "forward_step"]


class RunCtx:
    """The context of one call of `train_step` or `forward_step`; or of the time before, when nothing can be marked.

    Args:
        context: hvdtrain's context, which receives the losses and outputs.

    Attributes:
        stage: "init" (while the config is read, in get_model), "train_step" (also in an evaluation) or "forward_step".
        train_flag: whether the model is in training mode.
        step: steps done in the whole training before this call.
        epoch: counted from 1.
        expected_outputs: templates from the config's `model_outputs`, in a forward_step; None without that key.
    """

    def __init__(self, stage: Stage, context: RunContext, expected_outputs: TensorDict | None = None) -> None:
        self.stage = stage
        self.train_flag = context.train_flag
        self.step = context.step
        self.epoch = context.epoch
        self.expected_outputs = expected_outputs
        self.outputs = TensorDict()
        self._context = context

    def mark_as_loss(
        self,
        loss: Any,
        name: str,
        *,
        dims: Sequence[Dim] | None = None,
        scale: float = 1.0,
        as_error: bool = False,
        use_normalized_loss: bool = False,
        use_flatten_frames: bool = True,
        custom_inv_norm_factor: Any | None = None,
    ) -> None:
        """Mark a loss to be minimized, or an error to be reported. See `hvdtrain.context.RunContext.mark_as_loss`.

        Args:
            loss: one number per element: a Tensor, whose padding is left out, or a raw tensor, all of whose elements count.
            name: name in the log.
            dims: the dims of a raw tensor that has padding.
            use_flatten_frames: ignored; padding is always left out.
            custom_inv_norm_factor: the count, if it is not the number of elements: a Tensor, raw tensor or number; it is summed.

        Raises:
            ConfigError: called outside of a train_step, or the name is already taken.
        """
        self._expect("train_step", "mark_as_loss")
        values = without_padding(loss if isinstance(loss, Tensor) or dims is None else Tensor(name, dims, raw_tensor=loss))
        if not isinstance(values, torch.Tensor):
            raise ConfigError.of(
                "wrong-result", f"mark_as_loss: expected a tensor as the loss {name!r}, got {type(loss).__name__}"
            )
        if not values.is_floating_point():
            values = values.to(torch.get_default_dtype())
        count = None if custom_inv_norm_factor is None else without_padding(custom_inv_norm_factor)
        self._context.mark_as_loss(
            values, name, scale=scale, as_error=as_error, use_normalized_loss=use_normalized_loss, custom_inv_norm_factor=count
        )

    def mark_as_output(self, tensor: Any, name: str, *, dims: Sequence[Dim] | None = None) -> None:
        """Mark an output of `forward_step`.

        Args:
            tensor: a Tensor, or a raw tensor of shape (batch, ...).
            name: a key of `model_outputs`, if the config has that.
            dims: the dims of the tensor, whose sizes determine the padding that is removed. Default: those of `model_outputs`;
                without either, nothing is removed from a raw tensor.

        Raises:
            ConfigError: called outside of a forward_step, or the output does not match `model_outputs`.
        """
        self._expect("forward_step", "mark_as_output")
        expected = None
        if self.expected_outputs is not None:
            if name not in self.expected_outputs:
                raise ConfigError.of(
                    "wrong-result",
                    f"mark_as_output: expected one of model_outputs ({', '.join(self.expected_outputs)}), got {name!r}",
                )
            expected = self.expected_outputs[name]
        if isinstance(tensor, Tensor):
            marked = tensor if dims is None else tensor.copy_transpose(dims)
        else:
            own = list(dims) if dims is not None else None if expected is None else list(expected.dims)
            marked = tensor if own is None else Tensor(name, own, raw_tensor=tensor)
        if expected is not None and isinstance(marked, Tensor):
            _check_expected(name, expected, marked)
        value = by_sequence(name, marked) if isinstance(marked, Tensor) else marked
        self._context.mark_as_output(value, name)
        if isinstance(marked, Tensor):
            self.outputs.data[name] = marked

    def mark_as_default_output(self, tensor: Any, *, shape: Sequence[Dim] | None = None) -> None:
        """Mark the output with the name 'output'."""
        self.mark_as_output(tensor, "output", dims=shape)

    def check_outputs_complete(self) -> None:
        """Raises: ConfigError, if an output of `model_outputs` was not marked."""
        missing = [name for name in self.expected_outputs or () if name not in self._context.outputs]
        if missing:
            raise ConfigError.of(
                "wrong-result", f"forward_step: expected all of model_outputs to be marked, got no {', '.join(missing)}"
            )

    def is_train_flag_enabled(self, *, func: Any = None) -> bool:
        """Whether the model is in training mode."""
        return self.train_flag

    @contextmanager
    def train_flag_ctx(self, train_flag: bool, *, func: Any = None) -> Iterator[None]:
        """Set `train_flag` inside the `with` block, for the config's own code. PyTorch's modules keep their own flags."""
        before, self.train_flag = self.train_flag, train_flag
        try:
            yield
        finally:
            self.train_flag = before

    def get_step_tensor(self) -> Tensor:
        return Tensor("step", [], "int64", raw_tensor=torch.tensor(self.step))

    def get_epoch_tensor(self) -> Tensor:
        return Tensor("epoch", [], "int64", raw_tensor=torch.tensor(self.epoch))

    def _expect(self, stage: Stage, called: str) -> None:
        if self.stage != stage:
            raise ConfigError.of(
                "wrong-call", f"get_run_ctx().{called}: expected to be called in {stage}, got called in {self.stage}"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise not_in_layer(f"get_run_ctx().{name}", [*dir(type(self)), *vars(self)])


TrainCtx = RunCtx
"""The name in `returnn.torch.engine` that RETURNN's first PyTorch engine had for it; recipes annotate arguments with it."""

_current: ContextVar[RunCtx] = ContextVar("hvdtrain_returnn_run_ctx")
_init = RunCtx("init", RunContext(epoch=1, step=0, train_flag=False))


def get_run_ctx() -> RunCtx:
    """The context of the step that is running."""
    return _current.get(_init)


@contextmanager
def running(context: RunCtx) -> Iterator[RunCtx]:
    """Make `context` what `get_run_ctx()` returns inside the `with` block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def without_padding(tensor: Any) -> Any:
    """The elements of a Tensor without padding, in one axis if there is any. Other values are returned unchanged."""
    if not isinstance(tensor, Tensor):
        return tensor
    mask = mask_of(tensor)
    return tensor.raw_tensor if mask is None else tensor.raw_tensor[mask]


def mask_of(tensor: Tensor) -> torch.Tensor | None:
    """A mask of the raw tensor's shape, False at padding; None if there is no padding."""
    raw = tensor.raw_tensor
    mask: torch.Tensor | None = None
    for axis, dim in enumerate(tensor.dims):
        if not dim.is_dynamic_seq_length() or dim.dyn_size is None:
            continue
        sizes = dim.get_dyn_size_ext_for_device(raw.device).copy_compatible_to_dims_raw(tensor.dims)
        frames = torch.arange(raw.shape[axis], device=raw.device)
        inside = frames.reshape([-1 if one is dim else 1 for one in tensor.dims]) < sizes
        mask = inside if mask is None else mask & inside
    return None if mask is None else mask.expand_as(raw)


def by_sequence(name: str, tensor: Tensor) -> list[Any]:
    """Split a Tensor into one raw tensor per sequence, without padding.

    Raises:
        ConfigError: the sizes of a dim are unknown.
    """
    axis = next((number for number, dim in enumerate(tensor.dims) if dim.is_batch_dim()), 0)
    dims = [dim for number, dim in enumerate(tensor.dims) if number != axis]
    for dim in dims:
        if dim.is_dynamic_seq_length() and dim.dyn_size is None:
            raise ConfigError.of(
                "wrong-result",
                f"mark_as_output: expected the sizes of {dim} of the output {name!r} in its dyn_size_ext.raw_tensor, got none",
            )
    rows = tensor.raw_tensor.movedim(axis, 0)
    return [row[tuple(_part(dim, number) for dim in dims)] for number, row in enumerate(rows)]


def _part(dim: Dim, number: int) -> slice:
    """The slice of an axis that belongs to a sequence; to the longest one if it has several hypotheses."""
    if not dim.is_dynamic_seq_length():
        return slice(None)
    return slice(0, int(dim.dyn_size[number].max()))


def _check_expected(name: str, expected: Tensor, got: Tensor) -> None:
    """Compare an output with its template in `model_outputs`. Raises: ConfigError."""
    fits = len(expected.dims) == len(got.dims) == got.raw_tensor.ndim and all(
        wanted.dimension in (None, size) for wanted, size in zip(expected.dims, got.raw_tensor.shape, strict=True)
    )
    if not fits:
        words = ", ".join(dim.name if dim.dimension is None else str(dim.dimension) for dim in expected.dims)
        raise ConfigError.of(
            "wrong-result",
            f"mark_as_output: expected {name!r} of shape ({words}) by model_outputs, got {tuple(got.raw_tensor.shape)}",
        )


def get_run_ctx_step() -> Tensor:
    """The number of steps done in the whole training before this one, as a scalar."""
    return get_run_ctx().get_step_tensor()


def get_default_float_dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def convert_to_tensor(
    value: Any, *, dims: Sequence[Dim] = (), name: str = "tensor", dtype: str | None = None, **_: Any
) -> Tensor:
    """Convert a raw tensor, an array or a number to a Tensor with the given dims."""
    if isinstance(value, Tensor):
        return value
    raw = torch.as_tensor(value)
    return Tensor(name, list(dims), raw_tensor=raw if dtype is None else raw.to(getattr(torch, dtype)))


def cast(tensor: Tensor, dtype: str) -> Tensor:
    """Convert a Tensor to another dtype."""
    return Tensor(tensor.name, tensor.dims, raw_tensor=tensor.raw_tensor.to(getattr(torch, dtype)), sparse_dim=tensor.sparse_dim)


def copy_to_device(tensor: Tensor, device: Any = None) -> Tensor:
    """Copy a Tensor to a device."""
    return tensor if device is None else tensor.to(device)


def reduce_sum(source: Tensor, *, axis: Dim | Sequence[Dim]) -> Tensor:
    """The sum over one or several dims, without padding."""
    return _reduced(source, axis, "sum", 0)


def reduce_mean(source: Tensor, *, axis: Dim | Sequence[Dim]) -> Tensor:
    """The mean over one or several dims, without padding."""
    ones = Tensor(source.name, source.dims, raw_tensor=torch.ones_like(source.raw_tensor))
    return reduce_sum(source, axis=axis) / reduce_sum(ones, axis=axis)


def reduce_max(source: Tensor, *, axis: Dim | Sequence[Dim]) -> Tensor:
    """The maximum over one or several dims, without padding."""
    return _reduced(source, axis, "amax", _limits(source.raw_tensor.dtype).min)


def reduce_min(source: Tensor, *, axis: Dim | Sequence[Dim]) -> Tensor:
    """The minimum over one or several dims, without padding."""
    return _reduced(source, axis, "amin", _limits(source.raw_tensor.dtype).max)


def _reduced(source: Tensor, axis: Dim | Sequence[Dim], operation: str, neutral: float) -> Tensor:
    over = [axis] if isinstance(axis, Dim) else list(axis)
    foreign = [dim for dim in over if dim not in source.dims]
    if foreign:
        raise ValueError(f"{source}: expected dims to reduce among {list(source.dims)}, got {foreign}")
    mask = mask_of(source)
    raw = source.raw_tensor if mask is None else source.raw_tensor.masked_fill(~mask, neutral)
    left = [dim for dim in source.dims if dim not in over]
    axes = [source.dims.index(dim) for dim in over]
    return Tensor(source.name, left, raw_tensor=getattr(raw, operation)(axes) if axes else raw)


def _limits(dtype: torch.dtype) -> Any:
    return torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
