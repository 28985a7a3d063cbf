"""Modules whose activations are not kept for backward, but computed again in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from hvdtrain.errors import ConfigError, Problem, problem


def checkpoint_activations(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Let modules recompute their activations in backward instead of keeping them (Chen et al., 2016).

    Random numbers are the same both times, and so are gradients. Names in checkpoints do not change.

    Args:
        patterns: patterns of module names, such as 'encoder.*'; a module inside another such module is checkpointed with it.

    Raises:
        ConfigError: no module matches a pattern, or one cannot be computed twice.
    """
    chosen: dict[str, torch.nn.Module] = {}
    matched: set[str] = set()
    for path, module in model.named_modules():
        matching = {pattern for pattern in patterns if path and fnmatchcase(path, pattern)}
        matched |= matching
        if matching and not any(path.startswith(f"{outer}.") for outer in chosen):
            chosen[path] = module
    names = [name for name, _ in model.named_modules() if name]
    problems = [
        Problem.of(
            "unknown-value",
            f"checkpoint_modules: expected names of the model's modules, such as {', '.join(names[:4])}, got {pattern!r}",
        )
        for pattern in patterns
        if pattern not in matched
    ]
    for path, module in chosen.items():
        if isinstance(module, CONTAINERS):
            kind = type(module).__name__
            problems += problem(
                "wrong-result", f"checkpoint_modules: expected modules that are called, got the {kind} {path} (try {path}.*)"
            )
        if any(isinstance(inner, _BatchNorm) and inner.track_running_stats for inner in module.modules()):
            problems += problem(
                "wrong-result",
                f"checkpoint_modules: expected modules without BatchNorm, whose statistics would be updated twice, got {path}",
            )
    if problems:
        raise ConfigError(problems)
    for module in chosen.values():
        module.forward = _checkpoint_forward(module, module.forward)


CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def _checkpoint_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return compute
