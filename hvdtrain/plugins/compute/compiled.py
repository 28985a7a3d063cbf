"""Models that torch.compile compiles on their first call."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvdtrain.config.check import did_you_mean
from hvdtrain.errors import ConfigError, problem, raised_text
from hvdtrain.learner.optimizer import class_names
from hvdtrain.learner.torch.assembly import Watch
from hvdtrain.runtime import log

GRAPHS = 64
"""The number of kinds of input (one sequence, one frame, training, evaluation) that a function is compiled for. PyTorch's limit
of 8 is soon reached, and then the function runs uncompiled."""

SEVERAL_LOSSES = (
    "torch_compile: expected accum_grad_multiple_step = 1, or one loss only with use_normalized_loss, got several losses to "
    "accumulate: their gradients are computed one by one, but a compiled backward runs only once, as it overwrites its input"
)
"""With PyTorch's donated_buffer = False it could run twice, but the cache may hold code that overwrites the input (2.13)."""


def compile_model(model: torch.nn.Module, wanted: bool | dict[str, Any]) -> Watch:
    """Have a model compiled on its first call; return the function that creates the context for its calls.

    Args:
        wanted: the key torch_compile: True, or options of torch.compile and `modules`, the classes (or their names)
            of the modules to compile one by one instead of the whole model.

    Raises:
        ConfigError: torch.compile has no such option, or the model has no such modules.
    """
    options = dict(wanted) if isinstance(wanted, dict) else {}
    modules = _select_modules(model, options.pop("modules")) if "modules" in options else [model]
    takes = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    problems = []
    for name in options.keys() - set(takes):
        hint = did_you_mean(name, [*takes, "modules"])
        problems += problem(
            "unknown-key", f"torch_compile.{name}: expected one of {', '.join(takes)}, modules, got {name!r}{hint}"
        )
    if problems:
        raise ConfigError(problems)
    usual = {"dynamic": True, "recompile_limit": GRAPHS}  # batches of any length share a graph
    options = {name: value for name, value in usual.items() if name in takes} | options
    try:
        for module in modules:
            _compile(module, options)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError.of("unknown-key", f"torch_compile: expected options of torch.compile, got {options}: {error}") from None
    return _watch


def _compile(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Compile a module. Module.compile skips PyTorch's code, such as Sequential.forward, so PyTorch's modules are compiled by
    their forward."""
    if type(module).__module__.startswith("torch.nn."):
        module.forward = torch.compile(module.forward, **options)
    else:
        module.compile(**options)


def _select_modules(model: torch.nn.Module, wanted: Any) -> list[torch.nn.Module]:
    """The model's modules of some classes, except those inside another such module, which are compiled with it."""
    classes = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    names = {cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2] for cls in classes}
    present = {name for module in model.modules() for name in class_names(module)}
    missing = sorted(names - present)
    if missing:
        hint = did_you_mean(missing[0], present)
        raise ConfigError.of(
            "unknown-value", f"torch_compile.modules: expected classes of the model's modules, got {missing[0]}{hint}"
        )
    chosen: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in chosen if outer) or "" in chosen
        if not is_inside and not names.isdisjoint(class_names(module)):
            chosen[path] = module
    return list(chosen.values())


@contextmanager
def _watch() -> Iterator[None]:
    """The context around calls that may compile: logs how long that takes. Raises: ConfigError, if there is no compiler."""
    from torch._dynamo import callback, exc  # here, as this import takes a second or two

    began = 0.0
    seconds: list[float] = []

    def begin(_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def end(_: Any) -> None:
        seconds.append(time.perf_counter() - began)

    handler = callback.callback_handler
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    except (exc.BackendCompilerFailed, exc.TorchDynamoException) as error:
        reason = _compile_error(error)
        raise ConfigError.of(
            "unavailable",
            f"torch_compile: expected PyTorch to compile the model, got: {reason} (a C++ compiler such as g++, or Triton "
            "on a GPU, is required; torch_compile = False needs none)",
        ) from error
    except RuntimeError as error:
        if "donated buffer" not in str(error):
            raise
        raise ConfigError.of("wrong-result", SEVERAL_LOSSES) from error
    finally:
        handler.remove_start_callback(begin)
        handler.remove_end_callback(end)
    if seconds:
        log.detail(f"torch.compile: {len(seconds)} graph{'s' if len(seconds) > 1 else ''} in {sum(seconds):.1f} s")


def _compile_error(error: Exception) -> str:
    """The first line of what PyTorch says, or of the exception of the compiler that it leaves out there."""
    said = str(error).strip().splitlines()[0].strip()
    return raised_text(getattr(error, "inner_exception", error)).splitlines()[0] if said.endswith(":") else said
