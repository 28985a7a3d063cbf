"""Optimizers of torch.optim by name."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.by_name import class_of
from hvdtrain.learner.optimizer_options import option_problems
from hvdtrain.learner.torch_parameter_groups import make_groups
from hvdtrain.learner.torch_tensors import trained_of


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
