"""`returnn.tensor`: tensors with named dims, with as much as a config needs to access the raw tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.returnn_layer.imports import not_in_layer


class _Kind:
    """The kind of a dim. Compared by identity, as in RETURNN."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Dim.Types.{self.name}"


class DimTypes:
    """The kinds of dims."""

    Unspecified = None
    Batch = _Kind("Batch")
    Spatial = _Kind("Spatial")
    Time = Spatial
    Feature = _Kind("Feature")


class Dim:
    """A named axis. Two dims are equal only if they are the same object.

    Args:
        dimension: the size; None if it differs between sequences; or a Tensor with these sizes.
        kind: a member of `Dim.Types`.

    Attributes:
        dimension, size: the size; None if it is not fixed.
        dyn_size_ext: the sizes if they are not fixed: an int32 Tensor of shape (batch,) on the CPU.
        vocab: the labels of the classes that the dim counts, if the config sets them.
    """

    Types = DimTypes

    def __init__(
        self,
        dimension: int | Tensor | None = None,
        *,
        name: str | None = None,
        description: str | None = None,
        kind: Any = None,
        dyn_size_ext: Tensor | None = None,
        vocab: Any = None,
    ) -> None:
        self.name = name if name is not None else description if description is not None else "unnamed"
        self.kind = kind
        self.vocab = vocab
        if isinstance(dimension, Tensor):
            dyn_size_ext, dimension = dimension, None
        self.dimension = None if dimension is None else int(dimension)
        if self.dimension is None and dyn_size_ext is None:
            dyn_size_ext = Tensor(self.name, [] if kind is DimTypes.Batch else [batch_dim], "int32")
        self.dyn_size_ext = dyn_size_ext

    @property
    def size(self) -> int | None:
        return self.dimension

    @property
    def description(self) -> str:
        return self.name

    @property
    def dyn_size(self) -> Any:
        """The raw sizes, shape (batch,); None if they are fixed or not known yet."""
        return None if self.dyn_size_ext is None else self.dyn_size_ext.raw_tensor

    @dyn_size.setter
    def dyn_size(self, sizes: Any) -> None:
        self._sizes().raw_tensor = sizes

    def is_batch_dim(self) -> bool:
        return self.kind is DimTypes.Batch

    def is_feature_dim(self) -> bool:
        return self.kind is DimTypes.Feature

    def is_spatial_dim(self) -> bool:
        return self.kind is DimTypes.Spatial

    is_time_dim = is_spatial_dim

    def is_static(self) -> bool:
        return self.dimension is not None

    def is_dynamic(self) -> bool:
        return self.dimension is None

    def is_dynamic_seq_length(self) -> bool:
        """Whether the size differs between sequences."""
        return self.dyn_size_ext is not None and bool(self.dyn_size_ext.dims)

    def need_masking(self) -> bool:
        return self.is_dynamic_seq_length()

    def is_dim_known(self) -> bool:
        return self.dimension is not None or self.dyn_size is not None

    def get_size_tensor(self, *, device: Any = None) -> Tensor:
        """The sizes as a Tensor; a fixed size as a scalar Tensor."""
        if self.dimension is not None:
            return Tensor(self.name, [], "int32", raw_tensor=torch.tensor(self.dimension, dtype=torch.int32, device=device))
        return self._sizes() if device is None else self._sizes().to(device)

    def get_dyn_size_ext_for_device(self, device: Any) -> Tensor:
        """The sizes on a device; `dyn_size_ext` itself stays on the CPU."""
        return self._sizes().to(device)

    def get_dim_value(self) -> int:
        """The size; the largest one if the sizes differ."""
        return self.dimension if self.dimension is not None else int(self._known().max())

    def get_dim_value_tensor(self) -> Tensor:
        """`get_dim_value` as a scalar Tensor."""
        return Tensor(self.name, [], "int32", raw_tensor=torch.tensor(self.get_dim_value(), dtype=torch.int32))

    def copy(self) -> Dim:
        sizes = None if self.dyn_size_ext is None else self.dyn_size_ext.copy()
        return Dim(self.dimension, name=self.name, kind=self.kind, dyn_size_ext=sizes, vocab=self.vocab)

    def reset_eager(self) -> None:
        """Remove the sizes of the last batch."""
        if self.dyn_size_ext is not None:
            self.dyn_size_ext.raw_tensor = None

    def _sizes(self) -> Tensor:
        if self.dyn_size_ext is None:
            self.dyn_size_ext = Tensor(self.name, [batch_dim], "int32")
        return self.dyn_size_ext

    def _known(self) -> Any:
        sizes = self._sizes().raw_tensor
        if sizes is None:
            raise ValueError(f"{self}: expected its sizes in dyn_size_ext.raw_tensor, got none yet")
        return sizes

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __repr__(self) -> str:
        return f"Dim{{{self.name!r}{'' if self.dimension is None else f'({self.dimension})'}}}"


class Tensor:
    """A tensor with named dims.

    Attributes:
        raw_tensor: the torch tensor; a numpy array for text and in a forward_callback; None in a template.
        dims: one per axis. `extern_data` has the order batch, time, features.
        sparse_dim: for class indices, the dim of the classes; None for other data.
    """

    def __init__(
        self,
        name: str,
        dims: Sequence[Dim],
        dtype: str | None = None,
        *,
        raw_tensor: Any = None,
        sparse_dim: Dim | None = None,
        feature_dim: Dim | None = None,
        feature_dim_axis: int | None = None,
        available_for_inference: bool = True,
    ) -> None:
        self.name = name
        self.dims: tuple[Dim, ...] = tuple(dims)
        self.dtype: str = dtype or ("float32" if raw_tensor is None else _dtype(raw_tensor))
        self.raw_tensor: Any = raw_tensor
        self.sparse_dim: Dim | None = sparse_dim
        self.available_for_inference = available_for_inference
        if feature_dim is None and feature_dim_axis is not None:
            feature_dim = self.dims[feature_dim_axis]
        features = [dim for dim in self.dims if dim.is_feature_dim() or (dim.kind is None and dim.is_static())]
        self.feature_dim: Dim | None = (
            feature_dim if feature_dim is not None else features[-1] if features and sparse_dim is None else None
        )

    @property
    def sparse(self) -> bool:
        return self.sparse_dim is not None

    @property
    def vocab(self) -> Any:
        return None if self.sparse_dim is None else self.sparse_dim.vocab

    @property
    def dim(self) -> int | None:
        """The number of classes or features."""
        dim = self.sparse_dim or self.feature_dim
        return None if dim is None else dim.dimension

    @property
    def ndim(self) -> int:
        """The number of dims without the batch."""
        return len([dim for dim in self.dims if not dim.is_batch_dim()])

    @property
    def batch_ndim(self) -> int:
        return len(self.dims)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The sizes without the batch; None for sizes that differ between sequences."""
        return tuple(dim.dimension for dim in self.dims if not dim.is_batch_dim())

    @property
    def batch_shape(self) -> tuple[int | None, ...]:
        return tuple(dim.dimension for dim in self.dims)

    @property
    def device(self) -> str | None:
        return None if self.raw_tensor is None or isinstance(self.raw_tensor, str) else str(self.raw_tensor.device)

    @property
    def seq_lens(self) -> Any:
        """hvdtrain's name for the sizes of the time dim: int32 of shape (batch,), on the CPU."""
        return self.get_time_dim_tag().dyn_size

    @property
    def mask(self) -> torch.Tensor:
        """hvdtrain's name for the mask: False at padding, shape (batch, time), on the device of the raw tensor."""
        frames: torch.Tensor = torch.arange(self.raw_tensor.shape[1], device=self.raw_tensor.device)
        return frames[None, :].less(self.seq_lens.to(self.raw_tensor.device, non_blocking=True)[:, None])

    def get_batch_dim_tag(self) -> Dim:
        return self._one([dim for dim in self.dims if dim.is_batch_dim()], "a batch axis")

    def get_time_dim_tag(self) -> Dim:
        return self._one(self._time_dims(), "a time axis")

    def get_sequence_lengths(self) -> Any:
        return self.get_time_dim_tag().dyn_size

    def have_batch_axis(self) -> bool:
        return any(dim.is_batch_dim() for dim in self.dims)

    def have_time_axis(self) -> bool:
        return bool(self._time_dims())

    def have_feature_axis(self) -> bool:
        return self.feature_dim is not None

    def copy(self, name: str | None = None) -> Tensor:
        """A Tensor with the same dims and the same raw tensor."""
        return self._like(self.raw_tensor, name=name)

    def copy_template(self, name: str | None = None) -> Tensor:
        """A Tensor with the same dims and without a raw tensor."""
        return self._like(None, name=name)

    def to(self, device: Any) -> Tensor:
        """Copy the Tensor to a device. A copy to a GPU is not waited for; the sizes of a batch are in pinned memory."""
        to_gpu = torch.device(device).type != "cpu"
        return self._like(None if self.raw_tensor is None else self.raw_tensor.to(device, non_blocking=to_gpu))

    def copy_compatible_to_dims(self, dims: Sequence[Dim]) -> Tensor:
        """Reorder the axes like `dims`, and add missing ones with size 1. Raises: ValueError, if a dim is not in `dims`."""
        foreign = [dim for dim in self.dims if dim not in dims]
        if foreign:
            raise ValueError(f"{self}: expected dims among {list(dims)}, got {foreign}")
        order = [self.dims.index(dim) for dim in dims if dim in self.dims]
        raw = self.raw_tensor.permute(order)
        raw = raw[tuple(slice(None) if dim in self.dims else None for dim in dims)]
        full = [dim if dim in self.dims else Dim(1, name=f"{dim.name} of size 1") for dim in dims]
        return Tensor(self.name, full, self.dtype, raw_tensor=raw, sparse_dim=self.sparse_dim, feature_dim=self.feature_dim)

    def copy_compatible_to_dims_raw(self, dims: Sequence[Dim]) -> Any:
        """The raw tensor of `copy_compatible_to_dims`."""
        return self.copy_compatible_to_dims(dims).raw_tensor

    def copy_transpose(self, dims: Sequence[Dim]) -> Tensor:
        """Reorder the axes. Raises: ValueError, if `dims` are other dims than this Tensor's."""
        if set(dims) != set(self.dims):
            raise ValueError(f"{self}: expected a permutation of its dims, got {list(dims)}")
        return self.copy_compatible_to_dims(dims)

    def reset(self) -> None:
        """Remove the raw tensor."""
        self.raw_tensor = None

    def _time_dims(self) -> list[Dim]:
        spatial = [dim for dim in self.dims if not dim.is_batch_dim() and dim is not self.feature_dim]
        return [dim for dim in spatial if dim.is_dynamic()] or [dim for dim in spatial if dim.is_spatial_dim()]

    def _one(self, found: list[Dim], what: str) -> Dim:
        if not found:
            raise ValueError(f"{self}: expected {what}, got none")
        return found[0]

    def _like(self, raw: Any, name: str | None = None) -> Tensor:
        dtype = self.dtype if raw is None else _dtype(raw)
        return Tensor(
            name or self.name, self.dims, dtype, raw_tensor=raw, sparse_dim=self.sparse_dim, feature_dim=self.feature_dim,
            available_for_inference=self.available_for_inference,
        )  # fmt: skip

    def _combined(self, other: Any, operation: str) -> Tensor:
        """Apply an elementwise operation with a number, or with a Tensor; the dims of one have to include those of the other."""
        if not isinstance(other, Tensor):
            return self._like(getattr(torch, operation)(self.raw_tensor, other))
        dims = self.dims if len(self.dims) >= len(other.dims) else other.dims
        left, right = (tensor.copy_compatible_to_dims_raw(dims) for tensor in (self, other))
        return Tensor(self.name, dims, raw_tensor=getattr(torch, operation)(left, right.to(left.device)))

    def __add__(self, other: Any) -> Tensor:
        return self._combined(other, "add")

    __radd__ = __add__

    def __mul__(self, other: Any) -> Tensor:
        return self._combined(other, "mul")

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Tensor:
        return self._combined(other, "sub")

    def __truediv__(self, other: Any) -> Tensor:
        return self._combined(other, "true_divide")

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __repr__(self) -> str:
        return f"Tensor{{{self.name!r}, {list(self.dims)}, {self.dtype}}}"


def no_attribute(owner: object, name: str) -> AttributeError:
    """The error about a missing attribute; a plain one for private names, which Python looks up in copying and pickling."""
    known = [*dir(type(owner)), *vars(owner)]
    return AttributeError(name) if name.startswith("_") else not_in_layer(f"{type(owner).__name__}.{name}", known)


def _dtype(raw: Any) -> str:
    """The dtype of a torch tensor or numpy array as a string, such as 'float32'."""
    dtype = getattr(raw, "dtype", None)
    kind = getattr(dtype, "kind", "")
    return "string" if kind in "OSU" and kind else str(dtype).removeprefix("torch.")


def FeatureDim(name: str, dimension: int | None, **options: Any) -> Dim:  # noqa: N802  # RETURNN's name
    """Create a feature dim."""
    return Dim(dimension, name=name, kind=DimTypes.Feature, **options)


def SpatialDim(name: str, dimension: int | Tensor | None = None, **options: Any) -> Dim:  # noqa: N802
    """Create a time or space dim."""
    return Dim(dimension, name=name, kind=DimTypes.Spatial, **options)


batch_dim = Dim(None, name="batch", kind=DimTypes.Batch)
"""The batch dim of all tensors of a step."""

single_step_dim = Dim(1, name="single_step", kind=DimTypes.Spatial)
"""In RETURNN, the dim of a function that is called for single steps."""
