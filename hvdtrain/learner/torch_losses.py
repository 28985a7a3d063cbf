"""Losses as a config marked them, with PyTorch: sums, counts, and what is minimized."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvdtrain.context import Loss
from hvdtrain.learner.losses import minimized, nothing_to_minimize


def numbers_of(losses: Mapping[str, Loss], device: torch.device) -> torch.Tensor:
    """The sums, then the counts; float64 of shape (2 * losses,)."""
    sums = [loss.value.detach().sum(dtype=torch.float64) for loss in losses.values()]
    return torch.stack(sums + [count_of(loss).to(device) for loss in losses.values()])


def count_of(loss: Loss) -> torch.Tensor:
    """How many elements a loss's sum goes over."""
    if loss.count is None:
        return torch.tensor(float(loss.value.numel()), dtype=torch.float64)
    return torch.as_tensor(loss.count).detach().sum(dtype=torch.float64)


def terms_of(losses: Mapping[str, Loss], scale: float) -> dict[str, torch.Tensor]:
    """The losses to be minimized: their sums times their scales, and times the scale of all losses."""
    return {name: _sum(loss.value) * (loss.scale * scale) for name, loss in minimized(losses).items()}


def total_of(losses: Mapping[str, Loss], divisors: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor | None:
    """The scalar to differentiate; None for a rank without a batch. Raises: ConfigError, where there is none."""
    total: torch.Tensor | None = None
    for name, term in terms_of(losses, scale).items():
        if name in divisors:
            term = term / divisors[name].to(term.dtype)
        total = term if total is None else total + term
    if losses and (total is None or not total.requires_grad):
        raise nothing_to_minimize()
    return total


def _sum(values: torch.Tensor) -> torch.Tensor:
    return (values.float() if values.dtype in (torch.float16, torch.bfloat16) else values).sum()
