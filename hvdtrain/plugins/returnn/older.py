"""What older configs of RETURNN have: ways to describe the data, and steps with the arguments of its first PyTorch engine.

The data: `num_inputs` and `num_outputs`, and pairs instead of dicts. The steps: `train_step(*, model, data, run_ctx, **_)`, where
`data` is a dict of raw tensors: 'x', and its sizes as 'x:size1'. Today's RETURNN passes a TensorDict as `extern_data` and no run
context, but most public recipes have this form. Some also take `train_ctx` or `global_train_step`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain.context import get_run_ctx


def with_older_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a config's function to take today's arguments; return the function itself if it already does."""
    try:
        named = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    wanted = OLDER.keys() & named.keys()
    if "extern_data" in named:
        wanted = {name for name in wanted if named[name].default is inspect.Parameter.empty}
    if not wanted:
        return function
    if "extern_data" in named:
        wanted |= {"extern_data"}
    elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        wanted |= {"data", "run_ctx"}

    def step(*, extern_data: Any, **more: Any) -> Any:
        older = {name: OLDER[name](extern_data) for name in wanted & OLDER.keys()}
        return function(**older, **({"extern_data": extern_data} if "extern_data" in wanted else {}), **more)

    return functools.update_wrapper(step, function, updated=())


class RawTensors(dict[str, Any]):
    """The raw tensors of a TensorDict, with 'x:sizeN' for the sizes of axis N of 'x' on the CPU.

    'x:seq_len' is 'x:size1'. The sequences' tags, 'seq_tag', are read when they are used.
    """

    def __init__(self, extern_data: Any) -> None:
        super().__init__()
        self._extern_data = extern_data
        for name, tensor in extern_data.data.items():
            if name != "seq_tag":
                self._add(name, tensor)

    def _add(self, name: str, tensor: Any) -> None:
        """Add a tensor and its sizes that are not fixed; for the batch axis, the number of sequences."""
        self[name] = tensor.raw_tensor
        for axis, dim in enumerate(tensor.dims):
            sizes = None if dim.dyn_size_ext is None else dim.dyn_size_ext.raw_tensor
            if sizes is not None:
                self[f"{name}:size{axis}"] = sizes
            elif dim.is_batch_dim():
                self[f"{name}:size{axis}"] = tensor.raw_tensor.shape[axis]

    def __missing__(self, name: str) -> Any:
        if name == "seq_tag":
            self[name] = self._extern_data["seq_tag"].raw_tensor  # raises a KeyError if there are no tags
        elif name.endswith(":seq_len") and (size := name.replace(":seq_len", ":size1")) in self:
            self[name] = self[size]
        else:
            raise KeyError(f"{name!r}: expected one of {', '.join(self)}")
        return self[name]


OLDER: dict[str, Callable[[Any], Any]] = {
    "data": lambda extern_data: RawTensors(extern_data),
    "run_ctx": lambda extern_data: OlderRunCtx(extern_data),
    "train_ctx": lambda extern_data: OlderRunCtx(extern_data),
    "global_train_step": lambda _: get_run_ctx().step,
}
"""Arguments that recipes take in their steps but RETURNN no longer passes; each is a function of `extern_data`."""


class OlderRunCtx:
    """The run context of the current step, with the attributes of the first PyTorch engine.

    Attributes:
        device: of the batch.
    """

    def __init__(self, extern_data: Any) -> None:
        self._context = importlib.import_module("returnn.frontend").get_run_ctx()
        self._extern_data = extern_data

    @property
    def device(self) -> str:
        devices = (getattr(tensor.raw_tensor, "device", None) for tensor in self._extern_data.data.values())
        return next((str(device) for device in devices if device is not None), "cpu")

    def mark_as_loss(self, loss: Any, name: str, *, inv_norm_factor: Any | None = None, **options: Any) -> None:
        """As today, but also accept the older name of `custom_inv_norm_factor`."""
        if inv_norm_factor is not None:
            options["custom_inv_norm_factor"] = inv_norm_factor
        self._context.mark_as_loss(loss, name, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def older_extern_data(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """`num_inputs` and `num_outputs` as `extern_data`; None if the config has neither."""
    outputs = values.get("num_outputs")
    if outputs is None and values.get("num_inputs") is None:
        return None
    sizes = dict(outputs) if isinstance(outputs, Mapping) else {"classes": outputs} if outputs is not None else {}
    extern_data = {}
    for name, size in sizes.items():
        if isinstance(size, Mapping):
            extern_data[name] = dict(size)
            continue
        extern_data[name] = entry_of(size if isinstance(size, (list, tuple)) else (size, 1))
        if name != "data":
            extern_data[name]["available_for_inference"] = False
    if "data" not in extern_data and values.get("num_inputs") is not None:
        extern_data["data"] = entry_of((values["num_inputs"], 1 if values.get("sparse_input") else 2))
    return extern_data


def entry_of(size: Sequence[Any]) -> dict[str, Any]:
    """An entry of `extern_data` for a size and a number of axes (1, if it is left out): labels have one.

    >>> entry_of((9001, 1)), entry_of([40, 2]), entry_of((3, 3))
    ({'dim': 9001, 'sparse': True}, {'dim': 40}, {'dim': 3, 'shape': (None, None, 3)})
    """
    dim, ndim = (*size, 1)[:2]
    if ndim == 1:
        return {"dim": dim, "sparse": True}
    return {"dim": dim} if ndim == 2 else {"dim": dim, "shape": (*[None] * (ndim - 1), dim)}


def with_entries(extern_data: Any) -> Any:
    """`extern_data` with dicts instead of pairs."""
    if not isinstance(extern_data, Mapping):
        return extern_data
    return {name: entry_of(entry) if isinstance(entry, (list, tuple)) else entry for name, entry in extern_data.items()}
