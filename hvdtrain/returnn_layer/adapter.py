"""Wraps the functions of a config that imports `returnn`, so that they receive what RETURNN would pass to them.

Also steps in the form that RETURNN's first PyTorch engine called: `train_step(*, model, data, run_ctx, **_)`. `data` is a dict of
raw tensors: 'x', and its sizes as 'x:size1'. Today's RETURNN passes a TensorDict as `extern_data` and no run context, but most
public recipes are of this form. A few also name `train_ctx` or `global_train_step` (`OLDER`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvdtrain.config.source import Source
from hvdtrain.context import get_run_ctx
from hvdtrain.errors import ConfigError, problem
from hvdtrain.returnn_layer.imports import ROOT, Installed, Layer, NotInLayer, explanation, is_installed, location
from hvdtrain.returnn_layer.names import HOOKS, with_hooks

if TYPE_CHECKING:
    from hvdtrain.returnn_layer.frontend import Stage
    from hvdtrain.returnn_layer.templates import TensorDict
    from hvdtrain.returnn_layer.tensors import Dim, Tensor

STEPS: dict[str, Stage] = {"train_step": "train_step", "forward_step": "forward_step"}


def layer_for_config() -> Layer | Installed:
    """What a config finds as `returnn`: the installed RETURNN, or else hvdtrain's stand-ins for some of its names."""
    return Installed() if is_installed() else Layer()


def adapted(source: Source, layer: Layer | Installed) -> Source:
    """The config with wrapped functions; the config itself if it does not import `returnn`."""
    if not layer.in_use:
        return source
    source = replace(with_todays_steps(source), for_returnn=True)
    if source.values.get("backend", "torch") != "torch":
        got = source.values["backend"]
        found = problem("unknown-value", f"backend: expected 'torch' in a config that imports returnn, got {got!r}")
        return replace(source, problems=(*source.problems, *found))
    if isinstance(layer, Installed):
        from hvdtrain.returnn_layer import installed_steps  # here, as it imports RETURNN

        return installed_steps.adapted(source, layer)
    layer.set_config(source.values)
    from hvdtrain.returnn_layer.templates import legacy_templates, templates_of  # here, as they import torch

    given = source.values.get("extern_data", legacy_templates(source.values))
    templates, problems = (None, []) if given is None else templates_of("extern_data", given)
    outputs, more = templates_of("model_outputs", source.values.get("model_outputs") or {})
    values = dict(source.values)
    for name, stage in STEPS.items():
        if callable(values.get(name)):
            values[name] = _step(values[name], stage, layer, templates, outputs)
    for name in ("get_model", "epoch_start", "epoch_end"):
        if callable(values.get(name)):
            values[name] = _with_modules(values[name], name, layer)
    with_hooks(values, lambda hook: _with_modules(hook, HOOKS, layer))
    if values.get("forward_callback") is not None and not isinstance(values["forward_callback"], str):
        values["forward_callback"] = _callback_maker(values["forward_callback"], layer, outputs)
    return replace(source, values=values, problems=(*source.problems, *problems, *more))


def with_todays_steps(source: Source) -> Source:
    """The config with steps that take today's arguments."""
    steps = {name: source.values[name] for name in STEPS if callable(source.values.get(name))}
    return replace(source, values={**source.values, **{name: with_older_arguments(step) for name, step in steps.items()}})


def _step(
    function: Callable[..., None],
    stage: Stage,
    layer: Layer,
    templates: Mapping[str, Tensor] | None,
    outputs: Mapping[str, Tensor],
) -> Callable[..., None]:
    """A train_step or forward_step that calls the config's function with a TensorDict, inside RETURNN's run context."""
    from hvdtrain.returnn_layer.frontend import RunCtx, running
    from hvdtrain.returnn_layer.templates import TensorDict, fill_templates, reset, templates_of_batch

    def step(*, model: Any, extern_data: Mapping[str, Any], **others: Any) -> None:
        context = get_run_ctx()
        inference = stage == "forward_step"
        reset(outputs.values())
        expected = TensorDict(outputs) if outputs and inference else None
        given = fill_templates(
            templates_of_batch(extern_data) if templates is None else templates,
            extern_data,
            context.seq_tags,
            inference=inference,
        )
        with running(RunCtx(stage, context, expected)) as returnn_context:
            with_modules(model=model, extern_data=given, **others)
            if inference:
                returnn_context.check_outputs_complete()

    with_modules = _with_modules(function, stage, layer)
    return _named(step, function)


def _with_modules(function: Callable[..., Any], name: str, layer: Layer) -> Callable[..., Any]:
    """The function, with the layer's modules active while it runs. Raises: ConfigError, if it uses a name that is missing."""

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            with layer.active():
                return function(*arguments, **options)
        except (NotInLayer, ImportError) as error:
            if isinstance(error, ImportError) and (error.name or "").partition(".")[0] != ROOT:
                raise
            raise ConfigError.of("raised", f"{name}, in {location(error)}: {explanation(error)}") from error

    return _named(call, function)


def _named(wrapper: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper with the name and docstring of the function or class; a partial object has none."""
    return functools.update_wrapper(wrapper, function, updated=())


def _callback_maker(value: Any, layer: Layer, outputs: Mapping[str, Tensor]) -> Callable[[], Any]:
    """A function that creates the callback; it runs on the rank that uses the callback."""

    def make() -> Callback:
        is_instance = hasattr(value, "process_seq") and not isinstance(value, type)
        callback = value if is_instance else _with_modules(value, "forward_callback", layer)()
        return Callback(callback, layer, outputs)

    return _named(make, value if isinstance(value, type) or hasattr(value, "__name__") else type(value))


class Callback:
    """Calls a config's forward_callback with TensorDicts of numpy arrays."""

    def __init__(self, inner: Any, layer: Layer, outputs: Mapping[str, Tensor]) -> None:
        self._inner = inner
        self._layer = layer
        self._outputs = outputs

    def init(self, *, model: Any) -> None:
        self._call("init", model=model)

    def process_seq(self, *, seq_tag: str, outputs: Mapping[str, Any]) -> None:
        self._call("process_seq", seq_tag=seq_tag, outputs=self._tensors(outputs))

    def finish(self) -> None:
        self._call("finish")

    def _call(self, method: str, **options: Any) -> None:
        _with_modules(getattr(self._inner, method), f"forward_callback.{method}", self._layer)(**options)

    def _tensors(self, outputs: Mapping[str, Any]) -> TensorDict:
        """The outputs of a sequence as Tensors, whose dims have the sizes of this sequence."""
        from hvdtrain.returnn_layer.templates import TensorDict
        from hvdtrain.returnn_layer.tensors import Dim, Tensor

        tensors = {}
        for name, output in outputs.items():
            raw = output.raw_tensor
            template = self._outputs.get(name)
            dims = [dim for dim in template.dims if not dim.is_batch_dim()] if template is not None else []
            if len(dims) != raw.ndim:
                dims = [Dim(size, name=f"{name}:axis-{number + 1}") for number, size in enumerate(raw.shape)]
            sized = [dim if dim.is_static() else _sized(dim, size) for dim, size in zip(dims, raw.shape, strict=True)]
            tensors[name] = Tensor(name, sized, raw_tensor=raw, sparse_dim=None if template is None else template.sparse_dim)
        return TensorDict(tensors)


def _sized(dim: Dim, size: int) -> Dim:
    """A dim like `dim` with the size of one sequence."""
    import numpy  # here, so that `--help` does without it

    from hvdtrain.returnn_layer.tensors import Dim, Tensor

    return Dim(Tensor(dim.name, [], "int32", raw_tensor=numpy.array(size, dtype=numpy.int32)), name=dim.name, kind=dim.kind)


def with_older_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a config as one with today's arguments; the function itself if it has them already."""
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
    elif any(one.kind is one.VAR_KEYWORD for one in named.values()):
        wanted |= {"data", "run_ctx"}

    def step(*, extern_data: Any, **others: Any) -> Any:
        older = {name: OLDER[name](extern_data) for name in wanted & OLDER.keys()}
        return function(**older, **({"extern_data": extern_data} if "extern_data" in wanted else {}), **others)

    return functools.update_wrapper(step, function, updated=())


class RawTensors(dict[str, Any]):
    """The raw tensors of a TensorDict, of RETURNN's or of hvdtrain's, with 'x:sizeN' for the sizes of axis N of 'x' on the CPU.

    'x:seq_len' is 'x:size1'. The tags of the sequences, 'seq_tag', are read when they are asked for.
    """

    def __init__(self, extern_data: Any) -> None:
        from hvdtrain.returnn_layer.templates import raw_tensors  # here, as it imports torch

        super().__init__(raw_tensors({name: tensor for name, tensor in extern_data.data.items() if name != "seq_tag"}))
        self._extern_data = extern_data

    def __missing__(self, name: str) -> Any:
        if name == "seq_tag":
            self[name] = self._extern_data["seq_tag"].raw_tensor  # raises a KeyError of its own
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
"""Arguments that recipes for RETURNN name in their steps and that its engine of today does not pass, by the batch."""


class OlderRunCtx:
    """The run context of the step that is running, with what it had at first.

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
        """As today, with the older name of `custom_inv_norm_factor`."""
        if inv_norm_factor is not None:
            options["custom_inv_norm_factor"] = inv_norm_factor
        self._context.mark_as_loss(loss, name, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
