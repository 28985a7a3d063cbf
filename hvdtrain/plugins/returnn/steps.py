"""Wraps the functions of a config that imports `returnn`: they see RETURNN's tensors and run context, hvdtrain sees its own.

A step gets a TensorDict with real Tensors. It marks losses and outputs in RETURNN's run context; when it returns, they are marked
in hvdtrain's. A model of `returnn.frontend` is converted by RETURNN to a `torch.nn.Module` with the same parameters, which
hvdtrain trains, saves and loads, while the config's functions get the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy
import returnn.frontend as rf
import torch
from returnn.datasets.packing import packed_batch_key_opts
from returnn.frontend._backend import get_backend_by_raw_tensor_type
from returnn.frontend.run_ctx import reset_run_ctx
from returnn.tensor import Dim, Tensor, TensorDict, batch_dim
from returnn.torch.data.extern_data import extern_data_template_from_config_opts, raw_dict_to_extern_data
from returnn.torch.frontend.bridge import rf_module_to_pt_module, wrapped_pt_module_to_rf_module

from hvdtrain.config.source import Source
from hvdtrain.context import RunContext, get_run_ctx
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.torch.tensors import TorchData
from hvdtrain.plugins.returnn.imports import WatchedImports, select_torch
from hvdtrain.plugins.returnn.older import older_extern_data, with_older_arguments
from hvdtrain.plugins.returnn.sizes import is_size, size_name

Stage = Literal["train_step", "forward_step"]
STAGES: tuple[Stage, ...] = ("train_step", "forward_step")

FOR_TORCH_ONLY = ("torch_compile", "sync_batch_norm")
"""Keys for modules of PyTorch; an rf.Module calls none."""

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Values of `default_float_dtype`."""

SEED = 42
"""The default of `random_seed`, in RETURNN as in hvdtrain."""


def wrap_functions(source: Source, imports: WatchedImports) -> Source:
    """The config with its functions wrapped."""
    imports.set_config(source.values)
    values = dict(source.values)
    problems: list[Problem] = []
    try:
        select_torch(values.get("behavior_version"))
    except Exception as error:  # RETURNN raises errors of several kinds, or an assert fails
        problems += problem(
            "unknown-value",
            f"behavior_version: expected one that RETURNN supports with PyTorch, got {values['behavior_version']!r}: {error}",
        )
    templates, of_data = _templates("extern_data", values.get("extern_data", older_extern_data(values)))
    outputs, of_outputs = _templates("model_outputs", values.get("model_outputs"))
    precision = Precision(values.pop("default_float_dtype") if values.get("default_float_dtype") in FLOAT_DTYPES else None)
    packing: Any = None
    for name in ("packed_tensors", "packed"):  # overrides have hvdtrain's names already
        packing = values.get(name, packing)
        if isinstance(values.get(name), dict) and packing:
            values[name], of_packing = _packed_keys(packing, templates)
            problems += of_packing
    steps = Steps(
        templates,
        outputs,
        precision,
        packing=packing if isinstance(packing, dict) else {},
        hands_on=values.get("forward_callback") is not None or bool(values.get("search_output_file")),
    )
    values |= _wrapped_functions(values, steps, precision)
    origins = dict(source.origins)
    if "search_labels" in values:
        origins.setdefault("search_labels", origins.get("search_output_file", ""))
    return replace(source, values=values, origins=origins, problems=(*source.problems, *problems, *of_data, *of_outputs))


def _wrapped_functions(values: Mapping[str, Any], steps: Steps, precision: Precision) -> dict[str, Any]:
    """Wrappers of the config's functions that take or return tensors or the model."""
    wrapped: dict[str, Any] = {}
    for stage in STAGES:
        if callable(values.get(stage)):
            step = with_older_arguments(values[stage])
            wrapped[stage] = _copy_metadata(functools.partial(steps.run, stage, step), step)
    if callable(values.get("get_model")):
        wrapped["get_model"] = _model_maker(values["get_model"], values, precision)
    for name in ("epoch_start", "epoch_end"):
        if callable(values.get(name)):
            wrapped[name] = _with_model_of_config(values[name])
    hooks = values.get("load_model_post_hooks")
    if isinstance(hooks, (list, tuple)):
        wrapped["load_model_post_hooks"] = [
            precision.wrap(_with_model_of_config(hook)) if callable(hook) else hook for hook in hooks
        ]
    if values.get("search_output_file") and values.get("search_labels") is None:
        wrapped["search_labels"] = steps.text
    callback = values.get("forward_callback")
    if callback is not None and not isinstance(callback, str):
        is_instance = hasattr(callback, "process_seq") and not isinstance(callback, type)
        wrapped["forward_callback"] = lambda: Callback(callback if is_instance else callback(), steps)
    return wrapped


class BatchEntry(Protocol):
    """The data of one key of a batch, as hvdtrain's learner passes it to a step."""

    raw_tensor: Any
    seq_lens: torch.Tensor


class Precision:
    """`default_float_dtype`: the type of the parameters, of the data and of tensors that functions create.

    Args:
        name: the name of the type; None: the default of PyTorch and RETURNN.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name

    def cast(self, model: torch.nn.Module) -> torch.nn.Module:
        return model if self.name is None else model.to(getattr(torch, self.name))

    @contextmanager
    def default(self) -> Iterator[None]:
        """Make it the default of PyTorch and RETURNN inside the `with` block."""
        if self.name is None:
            yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.name))
        try:
            with rf.set_default_float_dtype_ctx(self.name):
                yield
        finally:
            torch.set_default_dtype(before)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls the given one with this default."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self.default():
                return function(*arguments, **options)

        return _copy_metadata(call, function)


def _copy_metadata(wrapper: Callable[..., Any], function: Any) -> Callable[..., Any]:
    return functools.update_wrapper(wrapper, function, updated=())


def _templates(key: str, entries: Any) -> tuple[TensorDict | None, list[Problem]]:
    """RETURNN's templates for the entries of `extern_data` or `model_outputs` (`key`), and problems with them."""
    if entries is None:
        return None, []
    if not isinstance(entries, Mapping):
        return None, problem("wrong-type", f"{key}: expected a dict of dicts by data key, got {entries!r}")
    templates = TensorDict()
    problems: list[Problem] = []
    for name, options in entries.items():
        try:
            templates.update({name: options}, auto_convert=True)
        except Exception as error:  # RETURNN raises errors of many kinds
            reason = str(error) or type(error).__name__
            problems += problem("wrong-type", f"{key}.{name}: expected options of RETURNN's Tensor, got {options!r}: {reason}")
    return templates, problems


def _packed_keys(packing: dict[str, Any], templates: TensorDict | None) -> tuple[list[str], list[Problem]]:
    """The data keys that RETURNN's dict `packed_tensors` packs, and problems with the dict."""
    unknown = ", ".join(sorted(map(str, packing.keys() - {"gap", "align", "per_key"})))
    if unknown:
        return [], problem("unknown-key", f"packed_tensors: expected gap, align and per_key, got {unknown}")
    if templates is None:
        return [], problem("missing", "packed_tensors: expected extern_data with a dict, which has options by data key, got none")
    return [name for name in templates.data if _has_time(templates.data[name]) and _packing_of(packing, name)], []


def _has_time(template: Tensor) -> bool:
    return len(template.dims) > 1 and template.dims[1].dimension is None


def _packing_of(packing: dict[str, Any], name: str) -> dict[str, int] | None:
    """The options with which a data key is packed; None: it is padded."""
    options: dict[str, int] | None = packed_batch_key_opts(packing, name)
    return options


def _model_maker(function: Callable[..., Any], values: Mapping[str, Any], precision: Precision) -> Callable[..., torch.nn.Module]:
    """A get_model that returns a torch.nn.Module, initialized with RETURNN's random numbers."""

    def get_model(*, epoch: int, step: int, **more: Any) -> Any:
        seed = int(values.get("random_seed", SEED))
        rf.set_random_seed((epoch * 193939 + step * 19937 + seed * 27644437 + 479001599) % 2**31)  # as RETURNN's engine
        model = function(epoch=epoch, step=step, **more)
        if isinstance(model, torch.nn.Module):
            return precision.cast(model)
        if not isinstance(model, rf.Module):
            return model
        wanted = [name for name in FOR_TORCH_ONLY if values.get(name)]
        if wanted:
            rule = "expected a get_model that returns a torch.nn.Module, got an rf.Module"
            raise ConfigError([Problem.of("wrong-result", f"{name}: {rule}") for name in wanted])
        return precision.cast(rf_module_to_pt_module(model))

    return _copy_metadata(get_model, function)


def model_of_config(model: torch.nn.Module) -> Any:
    """The model that the config defines: an rf.Module, or the torch.nn.Module itself."""
    return wrapped_pt_module_to_rf_module(model) or model


def _with_model_of_config(function: Callable[..., Any]) -> Callable[..., Any]:
    return _copy_metadata(lambda *, model, **more: function(model=model_of_config(model), **more), function)


class Steps:
    """Calls the config's steps.

    Args:
        templates: for `extern_data`; None: they are derived from the data.
        outputs: templates for `model_outputs`; None: the config has none.
        precision: the type of the data.
        packing: how data without padding is laid out in memory: the dict `packed_tensors`; empty: as it comes.
        hands_on: whether the outputs go to a forward_callback or into search_output_file.

    Attributes:
        seen: by output, a template of a marked tensor, from which a callback gets the dims.
    """

    def __init__(
        self,
        templates: TensorDict | None,
        outputs: TensorDict | None,
        precision: Precision,
        *,
        packing: dict[str, Any],
        hands_on: bool,
    ) -> None:
        self._packing = packing
        self._templates = templates
        self._precision = precision
        self._outputs = outputs
        self._hands_on = hands_on
        self.seen: dict[str, Tensor] = {} if outputs is None else dict(outputs.data)
        self._batch_axis: Dim = batch_dim

    def run(
        self,
        stage: Stage,
        function: Callable[..., None],
        *,
        model: torch.nn.Module,
        extern_data: Mapping[str, BatchEntry],
        **more: Any,
    ) -> None:
        """Call a step, and copy its marks from RETURNN's run context to hvdtrain's. Raises: ConfigError."""
        context = get_run_ctx()
        device = next((str(entry.raw_tensor.device) for entry in extern_data.values() if _is_tensor(entry.raw_tensor)), "cpu")
        if self._outputs is not None:
            self._outputs.reset_content()
        tensors = self._tensors(extern_data, context, stage, device)
        if stage == "train_step":
            rf.init_train_step_run_ctx(train_flag=context.train_flag, step=context.step, epoch=context.epoch)
        else:
            last = max(0, context.step - 1)  # RETURNN's step of a model that is not trained on is that of its last batch
            rf.init_forward_step_run_ctx(expected_outputs=self._outputs, step=last, epoch=context.epoch)
        try:
            with rf.set_default_device_ctx(device), self._precision.default():
                function(model=model_of_config(model), extern_data=tensors, **more)
                if stage == "train_step":
                    mark_losses(rf.get_run_ctx().losses, context)
                else:
                    self._mark_outputs(rf.get_run_ctx(), context)
        finally:
            reset_run_ctx()

    def _tensors(self, batch: Mapping[str, BatchEntry], context: RunContext, stage: Stage, device: str) -> TensorDict:
        """A batch as a TensorDict. Raises: ConfigError, if the data does not match `extern_data`."""
        templates = self._templates
        if templates is None:
            templates = extern_data_template_from_config_opts({name: _options_of(entry) for name, entry in batch.items()})
        is_training = stage == "train_step"
        wanted = TensorDict()
        raw: dict[str, Any] = {}
        for name, template in templates.data.items():
            if name == "seq_tag" or not (is_training or template.available_for_inference):
                continue
            wanted.data[name] = template
            raw[name], raw[f"{name}:seq_len"] = _raw_values(name, template, batch)
            if not isinstance(batch[name], TorchData) and _is_tensor(raw[name]) and _has_time(template):
                raw[f"{name}:packed"] = _packing_of(self._packing, name) or {"gap": 0, "align": 1}
        tensors: TensorDict = raw_dict_to_extern_data(
            raw,
            extern_data_template=wanted,
            device=device,
            float_dtype=self._precision.name,
            with_eval_targets=is_training,
        )
        self._batch_axis = next((tensor.dims[0] for tensor in tensors.data.values()), batch_dim)
        if context.seq_tags is not None:
            tensors.data["seq_tag"] = SeqTags(self._batch_axis, context.seq_tags)
        return tensors

    def text(self, *, name: str, numbers: Array) -> str | None:
        """The text of an output by RETURNN's vocabulary: its own, or that of the target in `extern_data`; None: there is none."""
        dims = [self.seen[name].sparse_dim] if name in self.seen else []
        templates = {} if self._templates is None else self._templates.data
        dims += [templates[key].sparse_dim for key in ("classes", "targets") if key in templates]
        vocabulary = next((dim.vocab for dim in dims if dim is not None and dim.vocab is not None), None)
        return None if vocabulary is None else str(vocabulary.serialize_labels(numbers))

    def is_batch_axis(self, dim: Dim) -> bool:
        """Whether a dim is the batch axis. RETURNN uses the first dim of `extern_data` for it, whatever its kind."""
        return bool(dim == self._batch_axis or dim.is_batch_dim())

    def _mark_outputs(self, marked: Any, context: RunContext) -> None:
        """Mark the outputs of every sequence, without padding, in hvdtrain's run context. Raises: ConfigError."""
        missing = [name for name in self._outputs.data if name not in marked.outputs.data] if self._outputs is not None else []
        if missing:
            raise ConfigError.of(
                "wrong-result", f"forward_step: expected all of model_outputs to be marked, got no {', '.join(missing)}"
            )
        for name, output in marked.outputs.data.items():
            tensor = rf.unpack(output)
            axis = next((number for number, dim in enumerate(tensor.dims) if self.is_batch_axis(dim)), None)
            if axis is None:
                raise ConfigError.of(
                    "wrong-result", f"forward_step: expected the batch among the dims of the output {name!r}, got {tensor}"
                )
            first = tensor.copy_move_axis(axis, 0) if axis else tensor
            sizes = [_sizes(dim, first.dims[0]) for dim in first.dims[1:]]
            context.mark_as_output(_rows(first, sizes), name)
            self.seen[name] = first.copy_template()
            for number, values in enumerate(sizes):
                if self._hands_on and values is not None and values.ndim > 1:  # several hypotheses
                    context.mark_as_output(list(values), size_name(name, number))


def mark_losses(losses: Mapping[str, Any], context: RunContext) -> None:
    """Mark the losses of RETURNN's run context in hvdtrain's: one number for each element, and zeros in the padding."""
    for name, loss in losses.items():
        count = loss.custom_inv_norm_factor
        if count is None or isinstance(count, Tensor):
            count = loss.get_inv_norm_factor()
        values = loss.loss
        # A packed Tensor has no raw tensor of PyTorch, so only RETURNN can sum it.
        values = values.copy_masked(0.0).raw_tensor if _is_tensor(values.raw_tensor) else loss.get_summed_loss().raw_tensor
        context.mark_as_loss(
            values,
            name,
            scale=loss.scale,
            as_error=loss.as_error,
            use_normalized_loss=loss.use_normalized_loss,
            custom_inv_norm_factor=count.raw_tensor if isinstance(count, Tensor) else count,
            seq_lens=1 if len(loss.loss.dims) == 1 and loss.loss.dims[0].is_batch_dim() else None,
        )


class SeqTags(Tensor):  # type: ignore[misc]
    """`extern_data["seq_tag"]`, which is read only when it is used.

    Args:
        batch_axis: its only dim.
        read: returns the tags of the batch.
    """

    __slots__ = ("_read", "_tags")

    def __init__(self, batch_axis: Dim, read: Callable[[], list[str]]) -> None:
        self._read = read
        self._tags: Array | None = None
        super().__init__("seq_tag", [batch_axis], "string")

    @property
    def raw_tensor(self) -> Array:
        if self._tags is None:
            self._tags = numpy.array(self._read())
        return self._tags

    @raw_tensor.setter
    def raw_tensor(self, tags: Array | None) -> None:
        self._tags = tags

    @property
    def _raw_backend(self) -> Any:
        """Called by functions of returnn.frontend, which afterwards use the raw tensor of the base class."""
        self._raw_tensor = self.raw_tensor  # type: ignore[misc]  # a slot of the base class
        return get_backend_by_raw_tensor_type(numpy.ndarray)

    def copy(self, name: str | None = None) -> Tensor:
        return Tensor(name or self.name, self.dims, self.dtype, raw_tensor=self.raw_tensor)


class Callback:
    """Calls a config's forward_callback with TensorDicts of numpy arrays, as RETURNN does."""

    def __init__(self, inner: Any, steps: Steps) -> None:
        self._inner = inner
        self._steps = steps

    def init(self, *, model: torch.nn.Module) -> None:
        self._inner.init(model=model_of_config(model))

    def process_seq(self, *, seq_tag: str, outputs: Mapping[str, Any]) -> None:
        tensors = TensorDict()
        for name, output in outputs.items():
            if name not in self._steps.seen and is_size(name):
                continue  # the sizes of an axis of another output
            tensors.data[name] = self._tensor(name, output.raw_tensor, outputs)
        self._inner.process_seq(seq_tag=seq_tag, outputs=tensors)

    def finish(self) -> None:
        self._inner.finish()

    def _tensor(self, name: str, raw: Array, outputs: Mapping[str, Any]) -> Tensor:
        """An output of one sequence, whose dims have the sizes of this sequence."""
        like = self._steps.seen.get(name)
        dtype = "string" if raw.dtype.kind == "U" else str(raw.dtype)
        if like is None or len(like.dims) != raw.ndim + 1:  # another rank computed it, and model_outputs has no template
            dims = [Dim(size, name=f"{name}:axis-{axis}") for axis, size in enumerate(raw.shape, start=1)]
            return Tensor(name, dims, dtype, raw_tensor=raw)
        dims = []
        for axis, (dim, size) in enumerate(zip(self._without_batch(like.dims), raw.shape, strict=True)):
            if dim.is_static():  # the axis of a raw tensor, which may have another size in this batch
                dims.append(dim if dim.dimension == size else Dim(size, name=dim.name))
                continue
            of_hypotheses = outputs.get(size_name(name, axis))
            sizes = numpy.array(size, dtype=numpy.int32) if of_hypotheses is None else of_hypotheses.raw_tensor
            size_dims = [] if of_hypotheses is None else self._without_batch(dim.dyn_size_ext.dims)
            dims.append(Dim(Tensor(dim.name, size_dims, str(sizes.dtype), raw_tensor=sizes), name=dim.name, kind=dim.kind))
        return Tensor(name, dims, dtype, sparse_dim=like.sparse_dim, raw_tensor=raw)

    def _without_batch(self, dims: Sequence[Dim]) -> list[Dim]:
        return [dim for dim in dims if not self._steps.is_batch_axis(dim)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _options_of(entry: BatchEntry) -> dict[str, Any]:
    raw = entry.raw_tensor
    sizes = tuple(raw.shape[1:] if not isinstance(entry, TorchData) else raw.shape[2:])
    is_sparse = not sizes and not (_is_tensor(raw) and raw.is_floating_point())
    dtype = str(raw.dtype).removeprefix("torch.") if _is_tensor(raw) else "string"
    return {"shape": (None, *sizes), "dim": None if is_sparse or not sizes else sizes[-1], "sparse": is_sparse, "dtype": dtype}


def _raw_values(name: str, template: Tensor, batch: Mapping[str, BatchEntry]) -> tuple[Any, torch.Tensor]:
    """The values of a data key and the lengths of its sequences. Raises: ConfigError, if they do not match the template."""
    if name not in batch:
        raise ConfigError.of(
            "unknown-key", f"extern_data.{name}: expected one of the dataset's data keys ({', '.join(batch)}), got none of them"
        )
    raw = batch[name].raw_tensor
    seq_lens = batch[name].seq_lens
    dims = template.dims
    if not isinstance(batch[name], TorchData) and _has_time(template):
        dims = template.dims[1:]  # the frames of all sequences are one axis
    elif not isinstance(batch[name], TorchData) and bool((seq_lens == 1).all()):
        raw = raw[:, None]
    if raw.ndim == len(dims) + 1 and bool((seq_lens == 1).all()):  # one frame per sequence: one value per sequence
        raw = raw[:, 0]
    if raw.ndim != len(dims) or any(dim.dimension not in (None, size) for dim, size in zip(dims, raw.shape, strict=True)):
        words = ", ".join(dim.name if dim.dimension is None else str(dim.dimension) for dim in dims)
        raise ConfigError.of(
            "wrong-result", f"extern_data.{name}: expected data of shape ({words}), got {tuple(raw.shape)} from the dataset"
        )
    if template.dtype == "string" and raw.dtype == object:  # texts of several lengths
        raw = raw.astype(str)
    return raw, seq_lens


def _sizes(dim: Dim, batch_axis: Dim) -> Array | None:
    """The sizes of an axis, shape (batch, ...); None if they are the same for all sequences. Raises: ConfigError."""
    if dim.dimension is not None or dim.dyn_size_ext is None or not dim.dyn_size_ext.dims:
        return None
    sizes = dim.dyn_size_ext
    if sizes.raw_tensor is None:
        raise ConfigError.of(
            "wrong-result", f"mark_as_output: expected the sizes of {dim} in its dyn_size_ext.raw_tensor, got none"
        )
    if batch_axis not in sizes.dims:
        return None
    axis = sizes.dims.index(batch_axis)
    values: Array = sizes.raw_tensor.movedim(axis, 0).cpu().numpy()
    return values


def _rows(tensor: Tensor, sizes: Sequence[Array | None]) -> list[Any]:
    """The raw tensor of each sequence, without padding: an axis is as long as the longest hypothesis."""
    longest = [None if values is None else values.reshape(len(values), -1).max(axis=1).tolist() for values in sizes]
    rows = []
    for number, row in enumerate(tensor.raw_tensor):
        within = tuple(slice(None) if lengths is None else slice(lengths[number]) for lengths in longest)
        rows.append(row[within] if within else numpy.array(row) if isinstance(row, str) else row)
    return rows
