"""Optimizers of torch.optim by name."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.by_name import class_of

WITHOUT_DECAY = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.Embedding)
"""Modules whose parameters weight decay leaves alone, as it does biases. (RETURNN's default.)"""


def make_optimizer(spec: dict[str, Any] | str | Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer from `{"class": "adamw", "weight_decay": 0.01, ...}`, a name, or a function of the parameters.

    The learning rate is set at every update; `epsilon` is another name for `eps`.

    Raises:
        ConfigError: there is no such optimizer, or it does not take such options.
    """
    if callable(spec):
        return spec([parameter for parameter in model.parameters() if parameter.requires_grad])  # type: ignore[no-any-return]
    options: dict[str, Any] = {"class": spec} if isinstance(spec, str) else dict(spec)
    wanted = options.pop("class")
    known = {
        name.lower(): member
        for name, member in vars(torch.optim).items()
        if isinstance(member, type) and issubclass(member, torch.optim.Optimizer) and member is not torch.optim.Optimizer
    }
    made = class_of(wanted, known, "optimizer.class")
    if "epsilon" in options:
        options["eps"] = options.pop("epsilon")
    try:
        return made(_groups(model, options.get("weight_decay")), lr=0.0, **options)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError([f"optimizer: expected options of {made.__name__}, got {options}: {error}"]) from None


def _groups(model: torch.nn.Module, weight_decay: float | None) -> list[dict[str, Any]]:
    """Parameters in one group, or in two where some are to be decayed and others are not."""
    decayed: dict[int, bool] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            decayed[id(parameter)] = not name.endswith("bias") and not isinstance(module, WITHOUT_DECAY)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not weight_decay:
        return [{"params": trained}]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if decayed[id(parameter)]]},
        {"params": [parameter for parameter in trained if not decayed[id(parameter)]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
