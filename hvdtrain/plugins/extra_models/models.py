"""The models of the key `extra_models`: used by train_step and forward_step, but neither trained nor saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.base import Communicator
from hvdtrain.config.references import as_function
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.frameworks import Extend
from hvdtrain.learner.torch.assembly import Assembly
from hvdtrain.learner.torch.model_file import read_file
from hvdtrain.plugins.extra_models import ExtraModelKeys
from hvdtrain.runtime import log
from hvdtrain.settings import Settings


def with_extra_models(settings: Settings, comm: Communicator) -> Extend:
    """Of the table `learner_extensions`: the models of the key `extra_models`, made once the trained one is there."""
    entries = settings.of(ExtraModelKeys).extra_models

    def extend(assembly: Assembly) -> None:
        assembly.extra_models = make_extra_models(entries, assembly.model, assembly.device, assembly.options.position)

    return extend


def make_extra_models(
    entries: Mapping[str, Any], trained: torch.nn.Module, device: torch.device, position: tuple[int, int]
) -> dict[str, torch.nn.Module]:
    """The models by name, loaded, frozen and in evaluation mode.

    Args:
        entries: the key's value.
        trained: the model that is trained.
        position: the epoch and the step that its get_model gets, too.

    Raises:
        ConfigError: a get_model returns no module, or one that shares parameters with the trained model, which would freeze them.
        CheckpointError: a file cannot be read, or has other parameters.
    """
    trained_names = {id(parameter): name for name, parameter in trained.named_parameters()}
    models: dict[str, torch.nn.Module] = {}
    epoch, step = position
    for name, entry in entries.items():
        where = f"extra_models.{name}"
        model = as_function(entry["get_model"], f"{where}.get_model")(epoch=epoch, step=step, device=str(device))
        if not isinstance(model, torch.nn.Module):
            raise ConfigError.of(
                "wrong-result", f"{where}.get_model: expected it to return a torch.nn.Module, got {type(model).__name__}"
            )
        shared = [path for path, parameter in model.named_parameters() if id(parameter) in trained_names]
        if shared:
            raise ConfigError.of(
                "wrong-result",
                f"{where}.get_model: expected a separate model, got one that shares parameters with the trained model: "
                f"{', '.join(shared[:5])} (they would be frozen)",
            )
        if entry.get("load") is not None:
            _load(model, Path(entry["load"]), where)
        models[name] = model.to(device).requires_grad_(False).eval()
        log.detail(f"{where}: {sum(parameter.numel() for parameter in model.parameters())} parameters, neither trained nor saved")
    return models


def _load(model: torch.nn.Module, file: Path, where: str) -> None:
    contents = read_file(file, torch.device("cpu"))
    inner = contents.get("model")
    state = inner if isinstance(inner, dict) else contents
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}.load: expected the parameters of its get_model in {file}, got others: {error}") from None
