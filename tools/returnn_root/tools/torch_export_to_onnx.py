#!/usr/bin/env python3
"""Export a model of a config for RETURNN to ONNX, with the arguments of RETURNN's tools/torch_export_to_onnx.py.

The inputs are those of `extern_data` that are available for inference, the outputs those of `model_outputs`; `forward_step` says
what is computed. The sizes of axes are inputs and outputs, too (`data:size1`), except for those that are a single number, which
the tensors' shapes tell. The package `returnn` has to be installed.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import returnn.frontend as rf
import torch
from returnn import __main__ as program
from returnn.tensor import TensorDict
from returnn.tensor.utils import tensor_dict_fill_random_numpy_
from returnn.torch.data.tensor_utils import tensor_dict_numpy_to_torch_
from returnn.torch.frontend.bridge import RFModuleAsPTModule
from returnn.util.basic import get_fwd_compat_kwargs


class ExportError(Exception):
    """What the user can mend."""


def main(arguments: list[str] | None = None) -> int:
    """Write the file; return the exit status."""
    options = parser().parse_args(arguments)
    try:
        export(options)
    except ExportError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {options.out_onnx_filename}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("config", help="a config with get_model, forward_step, extern_data and model_outputs")
    add("checkpoint", help="the model's file")
    add("out_onnx_filename", help="the file to write")
    add("--device", default="cpu", help="where the model is traced: cpu (default) or gpu")
    add("--verbosity", type=int, default=4, help="RETURNN's log_verbosity (default: 4)")
    add("--input_names", help="the names of the inputs, in the order that the exported model has, separated by commas")
    add("--output_names", help="the names of the outputs, likewise")
    return made


def export(options: argparse.Namespace) -> None:
    """Trace the model with random data, and write it. Raises: ExportError."""
    for path in (options.config, options.checkpoint):
        if not Path(path).is_file():
            raise ExportError(f"{path}: expected a file, got none")
    updates = {"log": None, "log_verbosity": options.verbosity, "task": "export", "device": options.device}
    program.init_config(config_filename=options.config, extra_updates=updates)
    config = program.config
    program.init_log()
    config.typed_dict.setdefault("backend", "torch")
    program.init_backend_engine()
    wanted = ("get_model", "forward_step", "extern_data", "model_outputs")
    if missing := [name for name in wanted if config.typed_value(name) is None]:
        raise ExportError(f"{options.config}: expected {', '.join(wanted)}, got none for {', '.join(missing)}")
    stored = torch.load(options.checkpoint, map_location=options.device.replace("gpu", "cuda"), weights_only=True)
    outputs = described(config.typed_value("model_outputs"))
    rf.init_forward_step_run_ctx(expected_outputs=outputs, step=stored["step"], epoch=stored["epoch"])
    rf.set_random_seed(42)
    model = config.typed_value("get_model")(epoch=stored["epoch"], step=stored["step"], **get_fwd_compat_kwargs())
    as_module = RFModuleAsPTModule(model) if isinstance(model, rf.Module) else model
    as_module.load_state_dict(stored["model"])

    inputs = described(config.typed_value("extern_data"))
    inputs.reset_content()
    for name in [name for name, value in inputs.data.items() if not value.available_for_inference]:
        del inputs.data[name]
    tensor_dict_fill_random_numpy_(inputs)
    tensor_dict_numpy_to_torch_(inputs)
    raw = inputs.as_raw_tensor_dict(include_scalar_dyn_sizes=False, exclude_duplicate_dims=True)
    input_names = ordered("--input_names", options.input_names, list(raw))
    output_names = ordered("--output_names", options.output_names, raw_names(outputs))
    traced = ForwardStep(as_module, model, config.typed_value("forward_step"), inputs, input_names, output_names)
    traced.eval()
    keywords: dict[str, Any] = {
        "input_names": input_names,
        "output_names": output_names,
        "dynamic_axes": dynamic_axes(inputs) | dynamic_axes(outputs),
    }
    write = config.typed_value("export")
    if write is None:
        write, keywords["dynamo"] = torch.onnx.export, False  # conditions on sizes in RETURNN's code are Python's
    write(traced, tuple(raw[name] for name in input_names), f=options.out_onnx_filename, **keywords)


def described(entries: dict[str, Any]) -> TensorDict:
    """The tensors that a config describes."""
    tensors = TensorDict()
    tensors.update(entries, auto_convert=True)
    return tensors


def raw_names(tensors: TensorDict) -> list[str]:
    """The names of tensors and of the sizes that are passed with them."""
    names = []
    for name, tensor in tensors.data.items():
        names.append(name)
        names += [f"{name}:size{axis}" for axis, dim in enumerate(tensor.dims) if _has_sizes(dim)]
    return names


def _has_sizes(dim: Any) -> bool:
    return dim.dyn_size_ext is not None and bool(dim.dyn_size_ext.dims)


def ordered(option: str, given: str | None, names: list[str]) -> list[str]:
    """The names in the order that was given. Raises: ExportError."""
    wanted = names if given is None else given.split(",")
    if sorted(wanted) != sorted(names):
        raise ExportError(f"{option}: expected {','.join(names)} in any order, got {given}")
    return wanted


def dynamic_axes(tensors: TensorDict) -> dict[str, dict[int, str]]:
    """By tensor, the axes whose length the exported model leaves open, with their names."""
    axes = {}
    for name, tensor in tensors.data.items():
        axes[name] = {axis: dim.name for axis, dim in enumerate(tensor.dims) if dim.is_dynamic()}
        for axis, dim in enumerate(tensor.dims):
            if _has_sizes(dim):
                sizes = dim.dyn_size_ext.dims
                axes[f"{name}:size{axis}"] = {number: each.name for number, each in enumerate(sizes) if each.is_dynamic()}
    return axes


class ForwardStep(torch.nn.Module):
    """The config's forward_step as a module: from tensors in the order of their names to tensors."""

    def __init__(
        self,
        module: torch.nn.Module,
        model: Any,
        forward_step: Callable[..., None],
        inputs: TensorDict,
        input_names: list[str],
        output_names: list[str],
    ) -> None:
        super().__init__()
        self.module = module  # so that its parameters are the exported model's
        self._model = [model]  # in a list, as it may be the module itself
        self._forward_step = forward_step
        self._inputs, self._input_names, self._output_names = inputs, input_names, output_names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run forward_step. Raises: ExportError, if it marks other outputs than the config describes."""
        data = self._inputs.copy_template()
        raw = dict(zip(self._input_names, tensors, strict=True))
        data.assign_from_raw_tensor_dict_(raw, with_scalar_dyn_sizes=False, duplicate_dims_are_excluded=True)
        for tensor in data.data.values():
            _set_lengths(tensor)
        self._forward_step(model=self._model[0], extern_data=data)
        context = rf.get_run_ctx()
        context.check_outputs_complete()
        outputs = context.outputs.as_raw_tensor_dict(include_scalar_dyn_sizes=False)
        if set(outputs) != set(self._output_names) or any(value is None for value in outputs.values()):
            raise ExportError(f"forward_step: expected the outputs {', '.join(self._output_names)}, got {', '.join(outputs)}")
        return tuple(outputs[name] for name in self._output_names)


def _set_lengths(tensor: Any) -> None:
    """Give axes whose size is a single number the length that the tensor has there."""
    for axis, dim in enumerate(tensor.dims):
        size = dim.dyn_size_ext
        if tensor.raw_tensor is not None and size is not None and not size.dims and size.raw_tensor is None:
            length = torch.as_tensor(tensor.raw_tensor.shape[axis])  # while tracing, a tensor that follows the input
            size.raw_tensor = length.to(getattr(torch, size.dtype))


if __name__ == "__main__":
    sys.exit(main())
