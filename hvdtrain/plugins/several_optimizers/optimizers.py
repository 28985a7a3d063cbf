"""Several optimizers that a config's key makes: which parameters each of them has."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError, problem
from hvdtrain.learner.frameworks import Extend
from hvdtrain.learner.optimizer import wrapped_rf_module
from hvdtrain.learner.optimizer_spec import MULTIPLIER, MULTIPLIERS, OTHERS, PARAMETERS
from hvdtrain.learner.torch import optimizer
from hvdtrain.learner.torch.assembly import Assembly
from hvdtrain.learner.torch.optimizer import make_one, optimizer_class, options_of
from hvdtrain.learner.torch.parameter_groups import make_groups, pattern_problems
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, SeveralOptimizers
from hvdtrain.learner.torch.tensors import named_trained
from hvdtrain.runtime import log
from hvdtrain.settings import Settings

MATRICES = "matrices"
"""A value of `parameters`: all with two axes, except embeddings."""

MUON = getattr(torch.optim, "Muon", None)
"""Muon, which takes matrices only; None: this version of PyTorch does not have it."""


def with_several(settings: Settings, comm: Communicator) -> Extend:
    """Of the table `learner_extensions`: several optimizers may be made of the key `optimizer`."""
    return extend


def extend(assembly: Assembly) -> None:
    """Have the learner make its optimizer here."""
    assembly.make_optimizer = make_optimizer


def make_optimizer(spec: Any, model: torch.nn.Module, fused: bool = False) -> AnyOptimizer:
    """As `make_optimizer` of learner/torch/optimizer.py; several from a list.

    Muon takes matrices only, so that `{"class": "muon", "others": {...}}` makes two optimizers, unless the model has nothing but
    matrices.

    Raises:
        ConfigError: there is no such optimizer, it has no such options, or a parameter has none.
    """
    if isinstance(spec, (list, tuple)):
        return _make_several({f"optimizer[{number}].": options_of(entry) for number, entry in enumerate(spec)}, model)
    if callable(spec) and not isinstance(spec, type):
        return optimizer.make_optimizer(spec, model, fused)
    options = options_of(spec if isinstance(spec, dict) else {"class": spec})
    if optimizer_class(options["class"], "optimizer.") is not MUON:
        return optimizer.make_optimizer(spec, model, fused)
    others = options.pop(OTHERS, None) or {"class": "adamw"}
    if _matrices(model).keys() == named_trained(model).keys():
        return optimizer.make_optimizer(options, model, fused)
    return _make_several({"optimizer.": options, f"optimizer.{OTHERS}.": options_of(others)}, model)


def _make_several(entries: dict[str, dict[str, Any]], model: torch.nn.Module) -> AnyOptimizer:
    """Several optimizers as one. An entry takes those of the remaining parameters that it asks for: all if it does not say which.

    They share the learning rate of each step, which is one for AdamW. So the updates of torch's Muon get the size of AdamW's, if
    the entry chooses neither a size nor a factor. Raises: ConfigError, if a parameter has no optimizer, or an optimizer none.

    Args:
        entries: the options of each, by the prefix of their names.
    """
    remaining = named_trained(model)
    members = []
    lines = []
    problems = []
    for where, options in entries.items():
        kind = optimizer_class(options.pop("class"), where)
        chosen = _choose(options.pop(PARAMETERS, MATRICES if kind is MUON else None), where, remaining, model)
        if not chosen:
            problems += problem(
                "wrong-result", f"{where}{PARAMETERS}: expected parameters for {kind.__name__}, got none that are left"
            )
            continue
        if kind is MUON and not {"adjust_lr_fn", MULTIPLIER, MULTIPLIERS} & options.keys():
            options["adjust_lr_fn"] = "match_rms_adamw"
        groups = make_groups(model, kind, options, where, chosen)
        members.append(make_one(kind, options, where, groups))
        lines.append(f"{kind.__name__} of {sum(parameter.numel() for parameter in chosen.values()):,} ({len(chosen)} tensors)")
        remaining = {name: parameter for name, parameter in remaining.items() if name not in chosen}
    if remaining:
        problems += problem(
            "wrong-result",
            f"optimizer: expected one for each trained parameter, got none for {', '.join(remaining)} (an entry without "
            f"{PARAMETERS!r} takes all that are left)",
        )
    if problems:
        raise ConfigError(problems)
    log.info(f"optimizer: parameters: {', '.join(lines)}")
    return SeveralOptimizers(members)


def _choose(
    wanted: Any, where: str, remaining: Mapping[str, torch.nn.Parameter], model: torch.nn.Module
) -> dict[str, torch.nn.Parameter]:
    """The remaining parameters that an entry asks for. Raises: ConfigError."""
    if wanted is None:
        return dict(remaining)
    if wanted == MATRICES:
        matrices = _matrices(model)
        return {name: parameter for name, parameter in remaining.items() if name in matrices}
    patterns = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError.of(
            "wrong-type",
            f"{where}{PARAMETERS}: expected {MATRICES!r}, or patterns of parameters' names such as ['encoder.*'], got {wanted!r}",
        )
    every_name = list(named_trained(model))
    problems = [problem for pattern in patterns for problem in pattern_problems(f"{where}{PARAMETERS}", pattern, every_name)]
    if problems:
        raise ConfigError(problems)
    return {name: parameter for name, parameter in remaining.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _matrices(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trained parameters with two axes, by name, except those that a layer uses as an embedding."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    looked_up = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, embeddings) or type(wrapped_rf_module(module)).__name__ == "Embedding"
        for parameter in module.parameters(recurse=False)
    }
    return {name: matrix for name, matrix in named_trained(model).items() if matrix.dim() == 2 and id(matrix) not in looked_up}
