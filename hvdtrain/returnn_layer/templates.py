"""`extern_data` of a RETURNN config: templates of tensors, and the TensorDict made of a batch."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Protocol

import numpy
import torch

from hvdtrain.errors import ConfigError
from hvdtrain.returnn_layer.tensors import Dim, DimTypes, Tensor, batch_dim, no_attribute

OPTIONS = (
    "dim", "sparse", "shape", "dtype", "dims", "dim_tags", "sparse_dim", "feature_dim", "feature_dim_axis", "time_dim_axis",
    "batch_dim_axis", "available_for_inference",
)  # fmt: skip
WITHOUT_MEANING = ("name", "vocab", "undefined", "auto_create_placeholders")
"""Options that say nothing to a config of plain PyTorch."""


class Given(Protocol):
    """One data key of a batch, as hvdtrain's learner hands it out."""

    raw_tensor: Any
    seq_lens: torch.Tensor


def templates_of(key: str, value: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The data keys of `extern_data` or `model_outputs` (`key`), without raw tensors; and the problems."""
    if not isinstance(value, Mapping):
        return {}, [f"{key}: expected a dict of dicts by data key, got {value!r}"]
    made, problems = {}, []
    for name, options in value.items():
        if isinstance(options, Tensor):
            made[name] = options.copy_template(name)
            continue
        if not isinstance(options, Mapping):
            problems.append(f"{key}.{name}: expected a dict such as {{'dim': 9}}, got {options!r}")
            continue
        try:
            made[name] = filled(name, options)
        except ValueError as error:
            problems.append(f"{key}.{name}: {error}")
    return made, problems


def filled(name: str, options: Mapping[str, Any]) -> Tensor:
    """The axes of a data key: batch, time and features unless the options say otherwise; class indices have no features.

    Raises:
        ValueError: an option is not known, or says what hvdtrain does not do.
    """
    unknown = [option for option in options if option not in (*OPTIONS, *WITHOUT_MEANING)]
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
        raise ValueError(f"expected Dims of returnn.tensor as dims, got {dims!r}")
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
    """The axes behind the batch."""
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
    """What `num_inputs` and `num_outputs` say in terms of `extern_data`; None where the config has neither."""
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


def with_batch(
    templates: Mapping[str, Tensor], batch: Mapping[str, Given], seq_tags: Callable[[], Any] | None, *, inference: bool
) -> TensorDict:
    """A batch in the axes of `extern_data`. Axes that the config made itself get their sizes, too.

    Args:
        seq_tags: the sequences' tags, asked for when the config asks for them.
        inference: leave out what is not `available_for_inference`.

    Raises:
        ConfigError: the data is not as `extern_data` says.
    """
    reset(templates.values())
    wanted = {name: one for name, one in templates.items() if name != "seq_tag" and not (inference and _is_target(one))}
    filled_in = {name: _with_values(name, template, batch) for name, template in wanted.items()}
    absent = {}
    if seq_tags is not None:
        absent["seq_tag"] = lambda: Tensor("seq_tag", [batch_dim], "string", raw_tensor=numpy.array(seq_tags()))
    return TensorDict(filled_in, absent)


def reset(templates: Any) -> None:
    """Forget the sizes of the last batch."""
    for template in templates:
        for dim in template.dims:
            if dim.is_dynamic():
                dim.reset_eager()


def from_batch(batch: Mapping[str, Given]) -> dict[str, Tensor]:
    """Templates made of the data itself, where the config says nothing."""
    made = {}
    for name, given in batch.items():
        sizes = tuple(given.raw_tensor.shape[2:])
        whole = not getattr(given.raw_tensor, "is_floating_point", lambda: False)()
        made[name] = filled(name, {"shape": (None, *sizes), "sparse": whole and not sizes})
    return made


def _is_target(template: Tensor) -> bool:
    return not template.available_for_inference


def _with_values(name: str, template: Tensor, batch: Mapping[str, Given]) -> Tensor:
    if name not in batch:
        raise ConfigError([f"extern_data.{name}: expected one of the dataset's data keys ({', '.join(batch)}), got none of them"])
    given = batch[name]
    raw, dims = given.raw_tensor, template.dims
    if raw.ndim == len(dims) + 1 and bool((given.seq_lens == 1).all()):  # one frame a sequence: the sequence's own value
        raw = raw[:, 0]
    fits = raw.ndim == len(dims) and all(dim.dimension in (None, size) for dim, size in zip(dims, raw.shape, strict=True))
    if not fits:
        raise ConfigError([f"extern_data.{name}: expected data of shape {_words(dims)}, got {tuple(raw.shape)} from the dataset"])
    if dims[0].is_dynamic() and dims[0].dyn_size is None:
        dims[0].dyn_size = torch.tensor(raw.shape[0], dtype=torch.int32)
    if len(dims) > 1 and dims[1].is_dynamic() and dims[1].dyn_size is None:
        dims[1].dyn_size = given.seq_lens
    tensor = template.copy_template()
    tensor.raw_tensor = raw
    tensor.dtype = "string" if isinstance(raw, numpy.ndarray) else str(raw.dtype).removeprefix("torch.")
    return tensor


def _words(dims: tuple[Dim, ...]) -> str:
    """(batch, time, 9)."""
    return f"({', '.join(dim.name if dim.dimension is None else str(dim.dimension) for dim in dims)})"


class TensorDict:
    """Tensors by name: what a step gets as `extern_data`.

    Args:
        made_when_asked: what makes Tensors that seldom anybody asks for.

    Attributes:
        data: the dict itself.
    """

    def __init__(
        self, data: Mapping[str, Tensor] | None = None, made_when_asked: Mapping[str, Callable[[], Tensor]] | None = None
    ) -> None:
        self.data: dict[str, Tensor] = dict(data or {})
        self._made_when_asked = dict(made_when_asked or {})

    def __getitem__(self, name: str) -> Tensor:
        if name in self._made_when_asked and name not in self.data:
            self.data[name] = self._made_when_asked[name]()
        if name not in self.data:
            raise KeyError(f"{name!r}: expected one of the data keys {', '.join(self.data)}")
        return self.data[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.data[name] = tensor

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self._made_when_asked

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

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __repr__(self) -> str:
        return f"TensorDict({self.data})"
