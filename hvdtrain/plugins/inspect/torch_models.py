"""Models of PyTorch: the shapes behind each module, and exports as a state_dict, a torch.export program, and ONNX."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from string import ascii_uppercase
from types import NoneType
from typing import Any

import torch

from hvdtrain.data.types import Batch
from hvdtrain.learner.base import Exported, Learner
from hvdtrain.runtime import log


def export(learner: Learner, batch: Batch, folder: Path) -> list[Exported]:
    """Write a learner's model, with the inputs of a batch."""
    return export_model(learner.model, lambda: learner.evaluate(batch), folder)


def output_shapes(learner: Learner, batch: Batch) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of the tensors from each module's first call for a batch, by the module's name."""
    with record_shapes(learner.model) as shapes:
        learner.evaluate(batch)
    learner.meter.take_scores()
    return shapes


def shapes_in(value: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors in a value, and in its lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [tuple(value.shape)]
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [shape for member in members for shape in shapes_in(member)]


@contextmanager
def record_shapes(model: torch.nn.Module) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """Inside the `with` block, record the shapes that each module returns in its first call, by its name."""
    shapes: dict[str, list[tuple[int, ...]]] = {}

    def note(name: str, output: Any) -> None:
        shapes.setdefault(name, shapes_in(output))

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name, module in model.named_modules()
    ]
    try:
        yield shapes
    finally:
        for hook in hooks:
            hook.remove()


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""

STATE, PROGRAM, ONNX = "state_dict.pt", "model.pt2", "model.onnx"

NOT_CALLED = "train_step does not call the model itself, model(...), but parts of it: its inputs are unknown"

GRU, LSTM = torch.ops.aten.gru.input, torch.ops.aten.lstm.input
RNNS = (torch.ops.aten.rnn_tanh.input, torch.ops.aten.rnn_relu.input)


def export_model(model: torch.nn.Module, evaluate: Callable[[], None], folder: Path) -> list[Exported]:
    """Write a model into a folder in every format that is possible.

    Args:
        evaluate: calls the model with a batch, as in an evaluation: a program takes inputs of these types.
    """
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    torch.save(state, folder / STATE)
    model_code = f"model = ...  # the {type(model).__qualname__} that the config's get_model makes"
    load = f'import torch\n\n{model_code}\nmodel.load_state_dict(torch.load("{STATE}", weights_only=True))\nmodel.eval()'
    written = [Exported(STATE, None, load)]
    with record_first_call(model) as calls:
        evaluate()
    model.eval()
    if not calls:
        return [*written, Exported(PROGRAM, NOT_CALLED), Exported(ONNX, NOT_CALLED)]
    with _silence_pytorch(), keep_recurrent_layers_whole():
        try:
            log.info(f"Writing {folder / PROGRAM} ...")
            program = _program(model, calls[0])
            torch.export.save(program, folder / PROGRAM)
        except Exception as error:  # torch.export can raise anything for the config's model
            return [*written, Exported(PROGRAM, _describe_error(error)), Exported(ONNX, f"it is made from {PROGRAM}")]
        run = f'model = torch.export.load("{PROGRAM}").module()\noutputs = model({_arguments(model, calls[0])})'
        sizes = _describe_inputs(program)
        return [*written, Exported(PROGRAM, None, f"import torch\n\n{run}", sizes), _onnx(program, folder / ONNX, sizes)]


def _program(model: torch.nn.Module, call: Call) -> torch.export.ExportedProgram:
    """The model as a program for inputs of any size, along all axes where the model allows it."""
    args, kwargs = call
    any_size, keywords_any_size = torch.utils._pytree.tree_map(
        lambda leaf: dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO) if isinstance(leaf, torch.Tensor) else None,
        (args, kwargs),
    )
    shapes = dict(inspect.signature(model.forward).bind(*any_size, **keywords_any_size).arguments)  # by forward's parameters
    with torch.no_grad():
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)


def _onnx(program: torch.export.ExportedProgram, file: Path, sizes: str) -> Exported:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        return Exported(ONNX, f"it needs {' and '.join(missing)} (pip install onnx onnxscript)")
    for node in program.graph.nodes:
        if node.target in RNNS:
            return Exported(ONNX, "PyTorch translates GRU and LSTM to ONNX, but not torch.nn.RNN")
        if node.target is LSTM and len({state.meta["val"].shape[2] for state in node.args[1]}) > 1:
            return Exported(ONNX, "ONNX has no LSTM with projections (proj_size)")
    log.info(f"Writing {file} ...")
    try:
        onnx_program = torch.onnx.export(program, dynamo=True, verbose=False)
        if onnx_program is None:
            return Exported(ONNX, "PyTorch made none")
        inputs: Any = onnx_program.model.graph.inputs
        for value in inputs:
            for axis, size in enumerate(value.shape or ()):
                if str(size).isdigit():  # PyTorch writes a fixed size as a symbolic one named after the number
                    value.shape[axis] = int(str(size))
        onnx_program.save(str(file), external_data=False)
    except Exception as error:  # such as an unsupported operator or version
        return Exported(ONNX, _describe_error(error))
    feeds = ", ".join(f'"{value.name}": {value.name}' for value in inputs)
    run = f'session = onnxruntime.InferenceSession("{ONNX}")\noutputs = session.run(None, {{{feeds}}})  # numpy arrays'
    return Exported(ONNX, None, f"import onnxruntime\n\n{run}", sizes)


@contextmanager
def keep_recurrent_layers_whole() -> Iterator[None]:
    """Inside the `with` block, a traced GRU, LSTM or RNN remains one operation for sequences of any length.

    By default, PyTorch traces it frame by frame to get the shapes of its results, which turns the length of the batch into a
    constant. Here, a formula gives the shapes.
    """
    importlib.import_module("torch._dynamo.exc")  # the compiler takes a second, and reads these tables when it is imported
    operators = (GRU, LSTM, *RNNS)
    formulas: Any = torch._decomp.decomposition_table
    own_kernels = {operator: dict(operator.py_kernels) for operator in operators}
    own_formulas = {operator: formulas[operator] for operator in operators if operator in formulas}
    try:
        formulas.update(dict.fromkeys(own_formulas, _recurrent_shapes))
        for operator, kernels in own_kernels.items():
            operator.py_kernels.update(dict.fromkeys(kernels, _recurrent_shapes))
            operator._dispatch_cache.clear()
        yield
    finally:
        formulas.update(own_formulas)
        for operator, kernels in own_kernels.items():
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _recurrent_shapes(
    input: torch.Tensor,
    states: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Empty tensors with the shapes and strides of a recurrent layer's results: its output and its last states."""
    states = states if isinstance(states, (list, tuple)) else (states,)
    length, batch, _ = (input.transpose(0, 1) if batch_first else input).shape
    output = input.new_empty((length, batch, states[0].shape[2] * (2 if bidirectional else 1)))
    return (output.transpose(0, 1) if batch_first else output, *(state.new_empty(state.shape) for state in states))


@contextmanager
def _silence_pytorch() -> Iterator[None]:
    """Inside the `with` block, PyTorch prints neither warnings nor graphs. Errors are raised as usual."""
    logs = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir")]
    levels = [log.level for log in logs]
    with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):
        try:
            for log in logs:
                log.setLevel(logging.ERROR)
            yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)


def _describe_inputs(program: torch.export.ExportedProgram) -> str:
    """Describe the inputs of a program: a letter for each size that may differ from the traced batch's, and the fixed sizes."""
    letters: dict[str, str] = {}  # by PyTorch's name of a size
    inputs = []
    fixed = []
    by_place: dict[str, str] = {}  # x[0]: A
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs and isinstance(value, torch.Tensor):
            sizes = [_replace_names(str(size), letters) for size in value.shape]
            inputs.append(f"{node.name} {str(value.dtype).removeprefix('torch.')} ({', '.join(sizes)})")
            fixed += [f"axis {axis} of {node.name} at {size}" for axis, size in enumerate(sizes) if size.isdigit()]
            by_place |= {f"{node.name}[{axis}]": size for axis, size in enumerate(sizes)}
    ranges = {letters[str(name)]: range for name, range in program.range_constraints.items() if str(name) in letters}
    limits = {letter: _limits(range) for letter, range in ranges.items()}
    free = [letter for letter in letters.values() if not limits.get(letter)]
    limits_text = [f"{', '.join(free)} of any size"] if free else []
    limits_text += [f"{letter}{limit}" for letter, limit in limits.items() if limit]
    parts = [", ".join(inputs) + (f" with {', '.join(limits_text)}" if limits_text else "")]
    parts += [f"fixed: {', '.join(fixed)}"] if fixed else []
    conditions = _conditions(getattr(program, "_guards_code", []), by_place)
    parts += [f"conditions: {', '.join(conditions)}"] if conditions else []
    return "; ".join(parts)


def _conditions(guards: Sequence[str], by_place: dict[str, str]) -> list[str]:
    """The first few conditions that a program checks on combinations of sizes, such as (B % 2) == 0.

    Args:
        guards: the conditions, with PyTorch's notation for sizes: L['x'].size()[1].
        by_place: the replacement for a size, by input and axis such as x[1].
    """

    def replacement(match: re.Match[str]) -> str:
        name = "_".join(re.findall(r"\w+", match[1]))  # PyTorch's name of a nested input
        return by_place.get(f"{name}[{match[2]}]", match[0])

    sums = [guard for guard in guards if re.search(r"[%*/+]", guard)]
    texts = [re.sub(r"L((?:\[[^]]+\])+)\.size\(\)\[(\d+)\]", replacement, guard) for guard in sums]
    return [*texts[:3], *([f"{len(texts) - 3} more"] if len(texts) > 3 else [])]


def _replace_names(size: str, letters: dict[str, str]) -> str:
    """Replace PyTorch's name in a size such as s77 or 2*s77 + 1 with A or another letter."""
    return re.sub(r"\b[su]\d+\b", lambda name: letters.setdefault(name[0], ascii_uppercase[len(letters) % 26]), size)


def _limits(range: Any) -> str:
    """The limits of a size. A lower limit of 2 is no limit: PyTorch assumes it for every symbolic size, and 1 works as well."""
    lower = f" from {range.lower}" if range.lower > 2 else ""
    return lower if str(range.upper) == "int_oo" else f"{lower} up to {range.upper}"


@contextmanager
def record_first_call(model: torch.nn.Module) -> Iterator[list[Call]]:
    """Inside the `with` block, record the arguments of the model's first call in the list."""
    calls: list[Call] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not calls:
            calls.append((args, kwargs))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def _arguments(model: torch.nn.Module, call: Call) -> str:
    """A call's arguments as code, with the names of forward's parameters for tensors."""
    args, kwargs = call
    names = iter(inspect.signature(model.forward).parameters)

    def code(name: str, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return name
        return repr(value) if isinstance(value, (int, float, str, NoneType)) else "..."

    positional = [code(next(names, "input"), value) for value in args]
    return ", ".join([*positional, *(f"{name}={code(name, value)}" for name, value in kwargs.items())])


def _describe_error(error: BaseException) -> str:
    """The first line of an error, or of its root cause, and the line of the config that caused it, if there is one."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    packages = str(Path(torch.__file__).parent.parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((packages, __file__))]
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else text
