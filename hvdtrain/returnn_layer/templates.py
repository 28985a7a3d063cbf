"""`extern_data` of a RETURNN config: the TensorDict of a batch, and the templates that describe its tensors."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Protocol

import numpy
import torch

from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.returnn_layer.tensors import Dim, DimTypes, Tensor, batch_dim, no_attribute


class TensorDict:
    """Tensors by name: the `extern_data` of a step.

    Args:
        lazy: functions that create a Tensor when it is first used.

    Attributes:
        data: the underlying dict.
    """

    def __init__(self, data: Mapping[str, Tensor] | None = None, lazy: Mapping[str, Callable[[], Tensor]] | None = None) -> None:
        self.data: dict[str, Tensor] = dict(data or {})
        self._lazy = dict(lazy or {})

    def __getitem__(self, name: str) -> Tensor:
        if name in self._lazy and name not in self.data:
            self.data[name] = self._lazy[name]()
        if name not in self.data:
            raise KeyError(f"{name!r}: expected one of the data keys {', '.join(self.data)}")
        return self.data[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.data[name] = tensor

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self._lazy

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def keys(self) -> KeysView[str]:
        return self.data.keys()

    def values(self) -> ValuesView[Tensor]:
        return self.data.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self.data.items()

    def as_raw_tensor_dict(self) -> dict[str, Any]:
        """The raw tensors by name, with 'x:sizeN' for the sizes of axis N of 'x' and without tags that were not read yet."""
        return raw_tensors(self.data)

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __repr__(self) -> str:
        return f"TensorDict({self.data})"


def raw_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The raw tensors by name, and their sizes where they are not fixed; of the batch, the number of sequences."""
    raw: dict[str, Any] = {}
    for name, tensor in tensors.items():
        raw[name] = tensor.raw_tensor
        for axis, dim in enumerate(tensor.dims):
            sizes = None if dim.dyn_size_ext is None else dim.dyn_size_ext.raw_tensor
            if sizes is not None:
                raw[f"{name}:size{axis}"] = sizes
            elif dim.is_batch_dim():
                raw[f"{name}:size{axis}"] = tensor.raw_tensor.shape[axis]
    return raw


OPTIONS = (
    "dim", "sparse", "shape", "dtype", "dims", "dim_tags", "sparse_dim", "feature_dim", "feature_dim_axis", "time_dim_axis",
    "batch_dim_axis", "available_for_inference",
)  # fmt: skip
IGNORED = ("name", "vocab", "undefined", "auto_create_placeholders")
"""Options without effect on a config for plain PyTorch."""


def templates_of(key: str, value: Any) -> tuple[dict[str, Tensor], list[Problem]]:
    """Templates for the data keys of `extern_data` or `model_outputs` (`key`), and the problems in these dicts."""
    if not isinstance(value, Mapping):
        return {}, problem("wrong-type", f"{key}: expected a dict of dicts by data key, got {value!r}")
    made, problems = {}, []
    for name, options in value.items():
        if isinstance(options, Tensor):
            made[name] = options.copy_template(name)
            continue
        if not isinstance(options, Mapping):
            problems += problem("wrong-type", f"{key}.{name}: expected a dict such as {{'dim': 9}}, got {options!r}")
            continue
        try:
            made[name] = template_of(name, options)
        except ValueError as error:
            problems += problem("wrong-type", f"{key}.{name}: {error}")
    return made, problems


def template_of(name: str, options: Mapping[str, Any]) -> Tensor:
    """The template of a data key. Unless the options differ, its dims are batch, time and, except for class indices, features.

    Raises:
        ValueError: an option is unknown, or has a value that is not supported.
    """
    unknown = [option for option in options if option not in (*OPTIONS, *IGNORED)]
    if unknown:
        raise ValueError(f"expected options out of {', '.join(OPTIONS)}, got {', '.join(unknown)}")
    if options.get("batch_dim_axis", 0) != 0:
        raise ValueError(f"expected the batch as the first axis (batch_dim_axis 0), got {options['batch_dim_axis']!r}")
    dims = options.get("dims", options.get("dim_tags"))
    sparse_dim, feature_dim = options.get("sparse_dim"), options.get("feature_dim")
    sparse = bool(options.get("sparse", sparse_dim is not None))
    dim = options.get("dim")
    if sparse and sparse_dim is None and dim is not None:
        sparse_dim = dim if isinstance(dim, Dim) else Dim(dim, name=f"{name}:classes", kind=DimTypes.Feature)
    if isinstance(sparse_dim, int):
        sparse_dim = Dim(sparse_dim, name=f"{name}:classes", kind=DimTypes.Feature)
    if dims is None:
        dims = [batch_dim, *_axes(name, options, sparse, feature_dim if isinstance(feature_dim, Dim) else dim)]
    if not all(isinstance(one, Dim) for one in dims):
        raise ValueError(f"expected dims of the type returnn.tensor.Dim, got {dims!r}")
    return Tensor(
        name,
        list(dims),
        options.get("dtype") or ("int32" if sparse else "float32"),
        sparse_dim=sparse_dim,
        feature_dim=feature_dim if isinstance(feature_dim, Dim) else None,
        feature_dim_axis=options.get("feature_dim_axis"),
        available_for_inference=bool(options.get("available_for_inference", True)),
    )


def _axes(name: str, options: Mapping[str, Any], sparse: bool, dim: Any) -> list[Dim]:
    """The dims after the batch."""
    shape = options.get("shape")
    if shape is None:
        has_time = options.get("time_dim_axis", 1) is not None
        shape = [*([None] if has_time else []), *([] if sparse or dim is None else [dim])]
    axes = []
    for number, size in enumerate(shape):
        if isinstance(size, Dim):
            axes.append(size)
        elif size is None:
            axes.append(Dim(None, name=f"{name}:time" if number == 0 else f"{name}:axis-{number + 1}", kind=DimTypes.Spatial))
        else:
            last = number == len(shape) - 1 and not sparse
            kind = DimTypes.Feature if last else DimTypes.Spatial
            axes.append(Dim(size, name=f"{name}:{'features' if last else f'axis-{number + 1}'}", kind=kind))
    return axes


def legacy_templates(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """`num_inputs` and `num_outputs` translated to `extern_data`; None if the config has neither."""
    outputs = values.get("num_outputs")
    if outputs is None and values.get("num_inputs") is None:
        return None
    given = dict(outputs) if isinstance(outputs, Mapping) else {"classes": outputs} if outputs is not None else {}
    made = {}
    for name, size in given.items():
        if isinstance(size, Mapping):
            made[name] = dict(size)
            continue
        dim, ndim = (*size, 1)[:2] if isinstance(size, (list, tuple)) else (size, 1)
        made[name] = {"dim": dim, "sparse": True} if ndim == 1 else {"dim": dim}
        if name != "data":
            made[name]["available_for_inference"] = False
    if "data" not in made and values.get("num_inputs") is not None:
        made["data"] = {"dim": values["num_inputs"]}
    return made


class BatchEntry(Protocol):
    """One data key of a batch, as hvdtrain's learner passes it to a step."""

    raw_tensor: Any
    seq_lens: torch.Tensor


def templates_of_batch(batch: Mapping[str, BatchEntry]) -> dict[str, Tensor]:
    """Templates derived from the data, for a config without `extern_data`."""
    made = {}
    for name, given in batch.items():
        sizes = tuple(given.raw_tensor.shape[2:])
        is_integer = not getattr(given.raw_tensor, "is_floating_point", lambda: False)()
        made[name] = template_of(name, {"shape": (None, *sizes), "sparse": is_integer and not sizes})
    return made


def fill_templates(
    templates: Mapping[str, Tensor], batch: Mapping[str, BatchEntry], seq_tags: Callable[[], Any] | None, *, inference: bool
) -> TensorDict:
    """A batch as the Tensors of `extern_data`. The sizes of dims that the config created are set, too.

    Args:
        seq_tags: returns the tags of the sequences; called when the config uses them.
        inference: leave out data that is not `available_for_inference`.

    Raises:
        ConfigError: the data does not match `extern_data`.
    """
    reset(templates.values())
    wanted = {name: one for name, one in templates.items() if name != "seq_tag" and not (inference and _is_target(one))}
    tensors = {name: _with_values(name, template, batch) for name, template in wanted.items()}
    lazy = {}
    if seq_tags is not None:
        lazy["seq_tag"] = lambda: Tensor("seq_tag", [batch_dim], "string", raw_tensor=numpy.array(seq_tags()))
    return TensorDict(tensors, lazy)


def reset(templates: Any) -> None:
    """Remove the sizes of the last batch from the dims."""
    for template in templates:
        for dim in template.dims:
            if dim.is_dynamic():
                dim.reset_eager()


def _is_target(template: Tensor) -> bool:
    return not template.available_for_inference


def _with_values(name: str, template: Tensor, batch: Mapping[str, BatchEntry]) -> Tensor:
    if name not in batch:
        raise ConfigError.of(
            "unknown-key", f"extern_data.{name}: expected one of the dataset's data keys ({', '.join(batch)}), got none of them"
        )
    given = batch[name]
    raw, dims = given.raw_tensor, template.dims
    if raw.ndim == len(dims) + 1 and bool((given.seq_lens == 1).all()):  # one frame per sequence: one value per sequence
        raw = raw[:, 0]
    fits = raw.ndim == len(dims) and all(dim.dimension in (None, size) for dim, size in zip(dims, raw.shape, strict=True))
    if not fits:
        raise ConfigError.of(
            "wrong-result",
            f"extern_data.{name}: expected data of shape {_shape_text(dims)}, got {tuple(raw.shape)} from the dataset",
        )
    if dims[0].is_dynamic() and dims[0].dyn_size is None:
        dims[0].dyn_size = torch.tensor(raw.shape[0], dtype=torch.int32)
    if len(dims) > 1 and dims[1].is_dynamic() and dims[1].dyn_size is None:
        dims[1].dyn_size = given.seq_lens
    tensor = template.copy_template()
    tensor.raw_tensor = raw
    tensor.dtype = "string" if isinstance(raw, numpy.ndarray) else str(raw.dtype).removeprefix("torch.")
    return tensor


def _shape_text(dims: tuple[Dim, ...]) -> str:
    """A shape in words, such as '(batch, time, 9)'."""
    return f"({', '.join(dim.name if dim.dimension is None else str(dim.dimension) for dim in dims)})"
