"""The parameter groups of the config's optimizer: which parameters decay, and by what factor the learning rate is multiplied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from hvdtrain.config.check import did_you_mean
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.optimizer import (
    BLACKLIST,
    INCLUDE,
    DecayRule,
    class_names,
    frontend_class_names,
    option_problems,
    take_decay_rule,
    wrapped_rf_module,
)  # fmt: skip
from hvdtrain.learner.optimizer_spec import MULTIPLIER, MULTIPLIERS
from hvdtrain.learner.torch.tensors import named_trained

DEFAULT_RULE = DecayRule((torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.Embedding))
"""The parameters of these modules do not decay, nor do biases."""

CUSTOM = "param_groups_custom"


def make_groups(
    model: torch.nn.Module,
    kind: type,
    options: dict[str, Any],
    where: str = "optimizer.",
    chosen: Mapping[str, torch.nn.Parameter] | None = None,
) -> list[dict[str, Any]]:
    """Remove the options about parameter groups, and return the groups to create an optimizer with.

    Args:
        made: the optimizer's class.
        options: the config's.
        where: the prefix of an option's name.
        chosen: the parameters of this optimizer, one of several, by name; None: all trained ones.

    Raises:
        ConfigError: with all problems.
    """
    custom = options.pop(CUSTOM, None)
    if custom is not None:
        return _custom_groups(custom, model, kind, options, where, is_only=chosen is None)
    parameters = named_trained(model) if chosen is None else chosen
    factors = _take_factors(options, where, list(parameters))
    modules = [layer for module in model.modules() for layer in (module, wrapped_rf_module(module)) if layer is not None]
    layer_names = {*vars(torch.nn), *frontend_class_names(), *(name for module in modules for name in class_names(module))}
    rule = take_decay_rule(options, DEFAULT_RULE, layer_names, where)
    undecayed: set[int] = set()
    if options.get("weight_decay"):
        undecayed = _ids_without_decay(model, rule, {id(parameter) for parameter in parameters.values()})
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for is_decayed in (True, False):
        for name, parameter in parameters.items():
            if (id(parameter) not in undecayed) == is_decayed:
                options_here = {} if is_decayed else {"weight_decay": 0.0}
                options_here |= {} if factors[name] == 1.0 else {MULTIPLIER: factors[name]}
                groups.setdefault((is_decayed, factors[name]), {"params": [], **options_here})["params"].append(parameter)
    return list(groups.values()) or [{"params": []}]


def _custom_groups(
    custom: Any, model: torch.nn.Module, kind: type, options: dict[str, Any], where: str, is_only: bool
) -> list[dict[str, Any]]:
    """The groups that the config's function returns. Raises: ConfigError."""
    if not is_only:
        raise ConfigError.of(
            "conflict", f"{where}{CUSTOM}: expected it with a single optimizer only, as it has to return groups of all parameters"
        )
    both = [name for name in (BLACKLIST, INCLUDE, MULTIPLIER, MULTIPLIERS) if options.pop(name, None) is not None]
    if both:
        raise ConfigError.of("conflict", f"{where}{both[0]}: expected it without {CUSTOM}, which makes all groups, got both")
    if not callable(custom):
        raise ConfigError.of(
            "wrong-type", f"{where}{CUSTOM}: expected a function (*, model, optimizer_class, **_), got {custom!r}"
        )
    groups = custom(model=model, rf_model=wrapped_rf_module(model), optimizer_class=kind, optimizer_opts=dict(options))
    return _check_groups(groups, model, kind)


def _ids_without_decay(model: torch.nn.Module, rule: DecayRule, chosen: set[int]) -> set[int]:
    decayed: dict[int, bool] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in chosen and id(parameter) not in decayed:  # the first name of a shared parameter counts
                decayed[id(parameter)] = rule.decays(module, name, parameter)
    return {parameter_id for parameter_id, is_decayed in decayed.items() if not is_decayed}


def _take_factors(options: dict[str, Any], where: str, names: Sequence[str]) -> dict[str, float]:
    """Remove the options about multipliers, and return the factor on the learning rate by parameter. Raises: ConfigError."""
    whole = options.pop(MULTIPLIER, 1.0)
    by_pattern = options.pop(MULTIPLIERS, None) or {}
    problems = _factor_problems(f"{where}{MULTIPLIER}", whole)
    if not isinstance(by_pattern, dict) or not all(isinstance(pattern, str) for pattern in by_pattern):
        raise ConfigError.of(
            "wrong-type",
            f"{where}{MULTIPLIERS}: expected a dict of patterns of parameters' names and factors, got {by_pattern!r}",
        )
    for pattern, factor in by_pattern.items():
        problems += _factor_problems(f"{where}{MULTIPLIERS}[{pattern!r}]", factor)
        problems += pattern_problems(f"{where}{MULTIPLIERS}", pattern, names)
    if problems:
        raise ConfigError(problems)
    factors = {}
    for name in names:
        matching = [factor for pattern, factor in by_pattern.items() if fnmatchcase(name, pattern)]
        factors[name] = float(whole * matching[0] if matching else whole)
    return factors


def _factor_problems(key: str, factor: Any) -> list[Problem]:
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 <= factor < float("inf"):
        return problem("out-of-range", f"{key}: expected zero or a positive number, got {factor!r}")
    return []


def pattern_problems(key: str, pattern: str, names: Sequence[str]) -> list[Problem]:
    """Whether a pattern matches the name of a parameter: one that matches none is misspelt."""
    if any(fnmatchcase(name, pattern) for name in names):
        return []
    hint = did_you_mean(pattern, names) or f" (some are {', '.join(names[:3])})"
    return problem("unknown-value", f"{key}: expected patterns of names of trained parameters, got {pattern!r}{hint}")


def take_multipliers(groups: list[dict[str, Any]]) -> list[float]:
    """Remove the learning rate multiplier from each group, and return them: an optimizer that loads a state takes over the
    checkpoint's groups, but the config's multipliers have to apply."""
    return [group.pop(MULTIPLIER, 1.0) for group in groups]


def _check_groups(groups: Any, model: torch.nn.Module, kind: type) -> list[dict[str, Any]]:
    """Check the groups from the config's function. Raises: ConfigError, unless they have each trained parameter exactly once."""
    made_groups = list(groups) if isinstance(groups, (list, tuple)) else []
    if not made_groups or not all(isinstance(group, dict) and "params" in group for group in made_groups):
        raise ConfigError.of(
            "wrong-result",
            f"optimizer.{CUSTOM}: expected it to return a list of dicts with the entry 'params', got {describe_type(groups)}",
        )
    problems = []
    for number, group in enumerate(made_groups):
        several = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        # The entries of named_parameters() are pairs (name, parameter).
        group["params"] = [entry[1] if isinstance(entry, tuple) else entry for entry in several]
        where = f"optimizer.{CUSTOM}[{number}]."
        group_options = {name: value for name, value in group.items() if name != "params"}
        problems += option_problems(kind, group_options, where, [MULTIPLIER])
        problems += _factor_problems(f"{where}{MULTIPLIER}", group.get(MULTIPLIER, 1.0))
    problems += parameter_problems(f"optimizer.{CUSTOM}", made_groups, model)
    if problems:
        raise ConfigError(problems)
    return made_groups


def describe_type(value: Any) -> str:
    inside = f" of {type(value[0]).__name__}" if isinstance(value, (list, tuple)) and value else ""
    return f"a {type(value).__name__}{inside}"


def names_by_group(model: torch.nn.Module, groups: Sequence[Sequence[torch.Tensor]]) -> list[list[str]]:
    """The names of the parameters in each group, in the order in which an optimizer's state numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter), "") for parameter in group] for group in groups]


def parameter_problems(where: str, groups: Sequence[Mapping[str, Any]], model: torch.nn.Module) -> list[Problem]:
    """Problems with the parameters in groups. A parameter in none of them would silently keep its initial values."""
    times = Counter(id(parameter) for group in groups for parameter in group["params"])
    names = {id(parameter) for parameter in model.parameters()}
    missing = [name for name, param in model.named_parameters() if param.requires_grad and not times[id(param)]]
    twice = [name for name, param in model.named_parameters() if times[id(param)] > 1]
    problems = []
    if missing:
        problems += problem(
            "wrong-result",
            f"{where}: expected each trained parameter of the model in its groups, got groups without {', '.join(missing)} "
            "(requires_grad_(False) leaves a parameter untrained)",
        )
    if twice:
        problems += problem(
            "wrong-result",
            f"{where}: expected each trained parameter of the model once in its groups, got {', '.join(twice)} twice",
        )
    if times.keys() - names:
        problems += problem(
            "wrong-result",
            f"{where}: expected the model's parameters in its groups, got a tensor that is not a parameter of the model",
        )
    return problems
