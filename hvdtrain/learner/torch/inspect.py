"""Looking at a model: its layers, a profile of its steps; and its export as a state_dict, a program of torch.export, and ONNX."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from hvdtrain.learner.base import Exported, Layer, Profiler


def layers_of(model: torch.nn.Module) -> Iterator[Layer]:
    """The model and its modules, each with its own parameters; a shared one belongs to the first module that has it."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {short: one for short, one in module.named_parameters(recurse=False) if id(one) not in seen}
        seen.update(map(id, own.values()))
        shapes = {short: tuple(one.shape) for short, one in own.items()}
        yield Layer(name, type(module).__name__, shapes, frozenset(short for short, one in own.items() if one.requires_grad))


def shapes_in(value: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors in a value, and in its lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [tuple(value.shape)]
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [shape for member in members for shape in shapes_in(member)]


@contextmanager
def noting_shapes(model: torch.nn.Module) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """Inside the `with` block, the shapes that each module returns in its first call are noted by its name."""
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


class _Profiler:
    """PyTorch's profiler: operators on the CPU, and on a GPU its kernels, too."""

    def __init__(self, on_gpu: bool) -> None:
        from torch import profiler  # here, as few trainings are profiled

        activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_gpu else [])]
        self._profile = profiler.profile(activities=activities)
        self._record = profiler.record_function

    def start(self) -> None:
        self._profile.start()

    def stop(self, file: Path) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(file))

    def range(self, name: str) -> AbstractContextManager[Any]:
        return self._record(name)


def profiler(on_gpu: bool) -> Profiler:
    """PyTorch's profiler."""
    return _Profiler(on_gpu)


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""

STATE, PROGRAM, ONNX = "state_dict.pt", "model.pt2", "model.onnx"

NOT_CALLED = "train_step does not call the model itself, model(...), but parts of it: what its inputs are is not known"


def export_model(model: torch.nn.Module, evaluate: Callable[[], None], folder: Path) -> list[Exported]:
    """Write a model into a folder in each form that is possible.

    Args:
        evaluate: calls the model for a batch, as an evaluation does: a program takes inputs of these types.
    """
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    torch.save(state, folder / STATE)
    made = type(model)
    written = [
        Exported(
            STATE,
            None,
            f"model = ...  # as get_model made it: {made.__module__}.{made.__qualname__}\n"
            f'model.load_state_dict(torch.load("{STATE}", weights_only=True))',
        )
    ]
    with first_call(model) as calls:
        evaluate()
    model.eval()
    if not calls:
        return [*written, Exported(PROGRAM, NOT_CALLED), Exported(ONNX, NOT_CALLED)]
    try:
        program = _program(model, calls[0])
        torch.export.save(program, folder / PROGRAM)
    except Exception as error:  # whatever torch.export has to say of the config's model
        return [*written, Exported(PROGRAM, _short(error)), Exported(ONNX, f"it is made of {PROGRAM}")]
    arguments = _words(calls[0])
    written.append(Exported(PROGRAM, None, f'model = torch.export.load("{PROGRAM}").module()\nmodel({arguments})'))
    return [*written, _onnx(program, folder / ONNX)]


def _program(model: torch.nn.Module, call: Call) -> torch.export.ExportedProgram:
    """The model as a program for inputs of any size, along the axes where the model allows that."""
    args, kwargs = call
    any_size = torch.utils._pytree.tree_map(
        lambda one: dict.fromkeys(range(one.dim()), torch.export.Dim.AUTO) if isinstance(one, torch.Tensor) else None,
        (args, kwargs),
    )
    with torch.no_grad():
        return torch.export.export(model, args, kwargs, dynamic_shapes=_by_parameter(model, *any_size), strict=False)


def _by_parameter(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names that forward gives them."""
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def _onnx(program: torch.export.ExportedProgram, file: Path) -> Exported:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        return Exported(ONNX, f"it needs {' and '.join(missing)} (pip install hvdtrain[export])")
    try:
        made = torch.onnx.export(program, dynamo=True, verbose=False)
        if made is None:
            return Exported(ONNX, "PyTorch made none")
        made.save(str(file), external_data=False)
    except Exception as error:  # an operator that ONNX lacks, a version that does not fit
        return Exported(ONNX, _short(error))
    return Exported(ONNX, None, f'session = onnxruntime.InferenceSession("{ONNX}")')


@contextmanager
def first_call(model: torch.nn.Module) -> Iterator[list[Call]]:
    """Inside the `with` block, the arguments of the model's first call are added to the list."""
    calls: list[Call] = []

    def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not calls:
            calls.append((args, kwargs))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def _words(call: Call) -> str:
    """The arguments of a call in words: types and shapes."""

    def words(value: Any) -> str:
        return f"<{value.dtype}, such as {list(value.shape)}>" if isinstance(value, torch.Tensor) else repr(value)

    args, kwargs = call
    return ", ".join([*map(words, args), *(f"{name}={words(value)}" for name, value in kwargs.items())])


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
