"""Wraps the functions of a config that imports `returnn`, so that they receive what RETURNN would pass to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy

from hvdtrain.config.source import Source
from hvdtrain.context import get_run_ctx
from hvdtrain.errors import ConfigError
from hvdtrain.returnn_layer.imports import Layer
from hvdtrain.returnn_layer.installed import Installed, is_installed
from hvdtrain.returnn_layer.missing import NotInLayer, explanation, location
from hvdtrain.returnn_layer.older import with_older_arguments
from hvdtrain.returnn_layer.stand_ins import ROOT

if TYPE_CHECKING:
    from hvdtrain.returnn_layer.run_ctx import Stage
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
    source = with_todays_steps(source)
    if source.values.get("backend", "torch") != "torch":
        problem = f"backend: expected 'torch' in a config that imports returnn, got {source.values['backend']!r}"
        return replace(source, problems=(*source.problems, problem))
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
    from hvdtrain.returnn_layer.run_ctx import RunCtx, running
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
            raise ConfigError([f"{name}, in {location(error)}: {explanation(error)}"]) from error

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
    from hvdtrain.returnn_layer.tensors import Dim, Tensor

    return Dim(Tensor(dim.name, [], "int32", raw_tensor=numpy.array(size, dtype=numpy.int32)), name=dim.name, kind=dim.kind)
