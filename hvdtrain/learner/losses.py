"""What a config's losses mean, whatever the framework: which are means, and which are minimized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.context import Loss
from hvdtrain.errors import ConfigError

TINY = 1e-30
"""What a sum is divided by where no element was counted: it is zero, too."""


@dataclass(frozen=True)
class Normalized:
    """The losses of a train_step that are to be means, and whether such a loss is all that is minimized."""

    names: tuple[str, ...]
    alone: bool


def normalized(losses: Mapping[str, Loss]) -> Normalized:
    """Which losses are to be means."""
    wanted = minimized(losses)
    names = tuple(name for name, loss in wanted.items() if loss.use_normalized_loss)
    return Normalized(names, alone=len(wanted) == 1)


def minimized(losses: Mapping[str, Loss]) -> dict[str, Loss]:
    """The losses that gradients come from."""
    return {name: loss for name, loss in losses.items() if not loss.as_error and loss.scale != 0}


def check_marked(losses: Mapping[str, Loss]) -> None:
    """Raises: ConfigError, if train_step marked nothing."""
    if not losses:
        raise ConfigError(["train_step: expected a call of hvdtrain.get_run_ctx().mark_as_loss(...), got none"])


def check_same(first: Normalized, own: Normalized) -> None:
    """Raises: ConfigError, if a step has other losses than the first one had."""
    if own != first:
        raise ConfigError([f"train_step: expected losses with use_normalized_loss as in the first step, {first}, got {own}"])


def nothing_to_minimize() -> ConfigError:
    """The error where no marked loss depends on a parameter."""
    return ConfigError(["train_step: expected a loss that depends on the model's parameters, got only errors or constants"])
