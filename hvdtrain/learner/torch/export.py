"""A trained model for use without hvdtrain: its state_dict, a program of torch.export, and ONNX."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hvdtrain.learner.base import Exported

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
    import inspect

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
