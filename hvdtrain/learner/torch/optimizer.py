"""The config's optimizer."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as GLOBAL_POST_HOOKS
from torch.optim.optimizer import _global_optimizer_pre_hooks as GLOBAL_PRE_HOOKS

from hvdtrain.config.absent import absent
from hvdtrain.errors import ConfigError, problem
from hvdtrain.learner.optimizer import class_of, construct
from hvdtrain.learner.optimizer_spec import MULTIPLIER
from hvdtrain.learner.torch.parameter_groups import describe_type, make_groups, parameter_problems
from hvdtrain.learner.torch.tensors import trained_of
from hvdtrain.runtime import log

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Classes with a fused GPU implementation in all supported versions of PyTorch."""

IMPLEMENTATIONS = {"fused", "foreach", "capturable", "differentiable"}
"""Options of torch.optim's classes that select or rule out an implementation."""


def make_optimizer(spec: dict[str, Any] | str | Any, model: torch.nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    """An optimizer from `{"class": "adamw", "weight_decay": 0.01, ...}`, a name, or a function of the parameters.

    A third-party class can be given as a class or as `"package.module.Class"`.

    The learning rate is set at every update; `epsilon` can be given for `eps`.

    Args:
        fused: prefer the fused implementation, which can skip an update itself, if the class has one and the options choose no
            other.

    Raises:
        ConfigError: there is no such optimizer, it has no such options, or a parameter has none.
    """
    if callable(spec) and not isinstance(spec, type):
        return _check_optimizer(spec(trained_of(model)), model)
    if isinstance(spec, (list, tuple)):
        raise ConfigError.of("wrong-type", f"optimizer: expected one, got a list{absent('several_optimizers')}")
    options = options_of(spec if isinstance(spec, dict) else {"class": spec})
    kind = optimizer_class(options.pop("class"), "optimizer.")
    return make_one(kind, options, "optimizer.", make_groups(model, kind, options), fused and _is_real(model))


def options_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of the key, with the names of options that PyTorch has."""
    return {"eps" if name == "epsilon" else name: value for name, value in entry.items()}


def _is_real(model: torch.nn.Module) -> bool:
    return all(parameter.is_floating_point() for parameter in trained_of(model))


def make_one(
    kind: type, options: dict[str, Any], where: str, groups: list[dict[str, Any]], fused: bool = False
) -> torch.optim.Optimizer:
    """An optimizer of a class. Raises: ConfigError."""
    if fused and issubclass(kind, FUSED) and not (IMPLEMENTATIONS | {"dampening"}) & options.keys():
        options["fused"] = True
    # It is set at every update, but some third-party classes assert that it is positive.
    rate = 0.0 if kind.__module__.startswith("torch.") else 1.0
    return construct(kind, options, where, groups, lr=rate)  # type: ignore[no-any-return]


def optimizer_class(wanted: Any, where: str) -> Any:
    """The class of an optimizer. Raises: ConfigError."""
    classes = {
        name.lower(): member
        for name, member in vars(torch.optim).items()
        if isinstance(member, type) and issubclass(member, torch.optim.Optimizer) and member is not torch.optim.Optimizer
    }
    is_path = isinstance(wanted, str) and "." in wanted
    kind = import_class(wanted, where) if is_path else class_of(wanted, classes, f"{where}class")
    if unfit := _unsupported_reason(kind):
        raise ConfigError.of("unsupported", f"{where}class: {unfit}")
    return kind


def _unsupported_reason(kind: type) -> str | None:
    """Why an optimizer class cannot be used; None: it can."""
    if issubclass(kind, torch.optim.SparseAdam):
        return "expected an optimizer for dense gradients, which are what ranks reduce, got SparseAdam (adam, adamw, ...)"
    parameters = (
        inspect.signature(kind.step).parameters.values() if hasattr(kind, "step") else ()
    )  # without `self`, also of decorated ones
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if needed[1:]:
        return (
            f"expected an optimizer that takes gradients as they are, got {kind.__name__}, whose step() needs a {needed[1]} to "
            "compute the loss again"
        )
    return None


def _check_optimizer(optimizer: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Check the result of the config's function. Raises: ConfigError, unless it is an optimizer with all trained parameters."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not callable(getattr(optimizer, "step", None)):
        raise ConfigError.of(
            "wrong-result", f"optimizer: expected a function that returns an optimizer of PyTorch, got {describe_type(optimizer)}"
        )
    problems = problem("unsupported", f"optimizer: {unfit}") if (unfit := _unsupported_reason(type(optimizer))) else []
    problems += parameter_problems("optimizer", groups, model)
    if problems:
        raise ConfigError(problems)
    _keep_ratios(optimizer)
    return optimizer  # type: ignore[no-any-return]


def _keep_ratios(optimizer: Any) -> None:
    """Make the ratios between the groups' learning rates multipliers of that of a step: of the rate that groups without their own
    have, or if all have their own, of the highest."""
    rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
    usual = float(getattr(optimizer, "defaults", {}).get("lr") or 0.0)
    base = usual if usual in rates else max(rates)
    if base and any(rate != base for rate in rates):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group[MULTIPLIER] = group.get(MULTIPLIER, 1.0) * rate / base
        shown = ", ".join(f"{rate / base:g}" for rate in rates)
        log.info(f"optimizer: the learning rates of its groups are {shown} times that of a step, as its own are")


HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""That of the function that PyTorch puts around each `step`: it searches for hooks within a range for profilers."""


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """A step of an optimizer, without what is around it if nothing uses that: it takes as long as the step of a small model."""
    step = type(optimizer).step
    # First, as an optimizer around another one may lack the attributes that PyTorch's constructor makes.
    is_usual = getattr(step, "__code__", None) is HOOKED and "step" not in vars(optimizer)
    if not is_usual or (
        optimizer._optimizer_step_post_hooks or GLOBAL_PRE_HOOKS or GLOBAL_POST_HOOKS or torch._C._autograd._profiler_enabled()
    ):
        optimizer.step()
    else:
        arguments: Any = (optimizer,), {}
        for hook in optimizer._optimizer_step_pre_hooks.values():
            arguments = hook(optimizer, *arguments) or arguments
        step.__wrapped__(*arguments[0], **arguments[1])  # type: ignore[attr-defined]


def complete_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Begin the momentum of parameters that get their first gradient later than others, where the fused SGD fails."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    groups = [group for group in optimizer.param_groups if group.get("fused") and group["momentum"] and not group["dampening"]]
    if not groups:
        return
    begun = sum(state.get("momentum_buffer") is not None for state in optimizer.state.values())
    if begun == sum(len(group["params"]) for group in optimizer.param_groups):
        return  # every parameter has had a gradient: nothing to look for in each of them in every update
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def import_class(name: str, where: str = "optimizer.") -> Any:
    """Import the class `package.module.Class`. Raises: ConfigError, if that fails."""
    module, _, last = name.rpartition(".")
    try:
        optimizer_class = getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.of(
            "cannot-import", f"{where}class: expected a name that can be imported, got {name!r}: {error}"
        ) from error
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise ConfigError.of("wrong-type", f"{where}class: expected a torch.optim.Optimizer, got {optimizer_class!r} as {name!r}")
    return optimizer_class
