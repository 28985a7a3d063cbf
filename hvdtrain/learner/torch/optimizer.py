"""The optimizer of a config, and its groups of parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.optimizer import BLACKLIST, INCLUDE, DecayRule, class_names, class_of, option_problems, take_decay_rule
from hvdtrain.learner.torch.tensors import trained_of


def make_optimizer(spec: dict[str, Any] | str | Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer from `{"class": "adamw", "weight_decay": 0.01, ...}`, a name, or a function of the parameters.

    The learning rate is set at every update; `epsilon` is another name for `eps`.

    Raises:
        ConfigError: there is no such optimizer, or it does not take such options.
    """
    if callable(spec) and not isinstance(spec, type):
        return spec(trained_of(model))  # type: ignore[no-any-return]
    options: dict[str, Any] = dict(spec) if isinstance(spec, dict) else {"class": spec}
    wanted = options.pop("class")
    known = {
        name.lower(): member
        for name, member in vars(torch.optim).items()
        if isinstance(member, type) and issubclass(member, torch.optim.Optimizer) and member is not torch.optim.Optimizer
    }
    made = class_of(wanted, known, "optimizer.class")
    if "epsilon" in options:
        options["eps"] = options.pop("epsilon")
    groups = make_groups(model, made, options)
    problems = option_problems(made, options, "optimizer.")
    if problems:
        raise ConfigError(problems)
    try:
        return made(groups, lr=0.0, **options)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError([f"optimizer: expected options of {made.__name__}, got {options}: {error}"]) from None


USUAL = DecayRule((torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.Embedding))
"""Weight decay leaves these modules' parameters alone, as it does biases. (RETURNN's default, and GroupNorm.)"""

CUSTOM = "param_groups_custom"
MULTIPLIER = "learning_rate_multiplier"


def make_groups(model: torch.nn.Module, made: type, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What the optimizer is made with. What the options say of groups is taken out of them.

    Args:
        made: the optimizer's class.
        options: those of the config.

    Raises:
        ConfigError: with all problems.
    """
    custom = options.pop(CUSTOM, None)
    if custom is not None:
        both = [name for name in (BLACKLIST, INCLUDE) if options.pop(name, None) is not None]
        if both:
            raise ConfigError([f"optimizer.{both[0]}: expected it without {CUSTOM}, which makes all groups, got both"])
        if not callable(custom):
            raise ConfigError([f"optimizer.{CUSTOM}: expected a function (*, model, optimizer_class, **_), got {custom!r}"])
        groups = custom(model=model, rf_model=None, optimizer_class=made, optimizer_opts=dict(options))
        return _checked(groups, model, made)
    asked = any(options.get(name) is not None for name in (BLACKLIST, INCLUDE))
    known = {*vars(torch.nn), *(name for module in model.modules() for name in class_names(module))}
    rule = take_decay_rule(options, USUAL, known)
    trained = trained_of(model)
    if not options.get("weight_decay"):
        if asked:
            raise ConfigError([f"optimizer.weight_decay: expected a positive number beside {BLACKLIST} or {INCLUDE}, got none"])
        return [{"params": trained}]
    decayed: dict[int, bool] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.requires_grad and id(parameter) not in decayed:  # a shared one goes by its first name
                decayed[id(parameter)] = rule.decays(module, name, parameter)
    groups = [
        {"params": [parameter for parameter in trained if decayed[id(parameter)]]},
        {"params": [parameter for parameter in trained if not decayed[id(parameter)]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def take_multipliers(groups: list[dict[str, Any]]) -> list[float]:
    """By group, what the learning rate is multiplied by. Taken out of the groups: an optimizer that loads a state takes over
    the groups of the checkpoint, and the config's multipliers are to hold."""
    return [group.pop(MULTIPLIER, 1.0) for group in groups]


def _checked(groups: Any, model: torch.nn.Module, made: type) -> list[dict[str, Any]]:
    """What a config's function made. Raises: ConfigError, unless it is groups that have every trained parameter once."""
    made_groups = list(groups) if isinstance(groups, (list, tuple)) else []
    if not made_groups or not all(isinstance(group, dict) and "params" in group for group in made_groups):
        raise ConfigError(
            [f"optimizer.{CUSTOM}: expected it to return a list of dicts with the entry 'params', got {_kind(groups)}"]
        )
    problems = []
    for number, group in enumerate(made_groups):
        several = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        group["params"] = [one[1] if isinstance(one, tuple) else one for one in several]  # some come with their names
        where = f"optimizer.{CUSTOM}[{number}]."
        others = {name: value for name, value in group.items() if name != "params"}
        problems += option_problems(made, others, where, [MULTIPLIER])
        factor = group.get(MULTIPLIER, 1.0)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor < 0:
            problems.append(f"{where}{MULTIPLIER}: expected zero or a positive number, got {factor!r}")
    times = Counter(id(parameter) for group in made_groups for parameter in group["params"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wrong = [name for name, one in model.named_parameters() if one.requires_grad and times[id(one)] != 1]
    wrong += [names.get(one, "a tensor that is no parameter of the model") for one in times if one not in names]
    if wrong:
        problems.append(
            f"optimizer.{CUSTOM}: expected each trained parameter of the model once in its groups, got others or another number "
            f"of {', '.join(wrong)} (requires_grad_(False) leaves a parameter untrained)"
        )
    if problems:
        raise ConfigError(problems)
    return made_groups


def _kind(value: Any) -> str:
    inside = f" of {type(value[0]).__name__}" if isinstance(value, (list, tuple)) and value else ""
    return f"a {type(value).__name__}{inside}"
