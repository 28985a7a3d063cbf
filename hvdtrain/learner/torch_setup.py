"""PyTorch's device and generators of random numbers."""

from __future__ import annotations

import random

import numpy
import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.numbers import mixed_seed


def device_of(wanted: str | None, local_rank: int) -> torch.device:
    """This rank's device, made the one that PyTorch uses. Raises: ConfigError."""
    count = torch.cuda.device_count()
    if wanted is None:
        wanted = "cuda" if count else "cpu"
    if wanted in ("cuda", "gpu"):
        if not count:
            raise ConfigError([f"device: expected a CUDA device for {wanted!r}, got none on this host"])
        wanted = f"cuda:{local_rank % count}"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError([f"device: expected cpu, cuda or cuda:N, got {wanted!r}"]) from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def seed_all(device: torch.device, *parts: int) -> None:
    """Seed torch, Python and numpy with a number mixed from the parts."""
    mixed = mixed_seed(*parts)
    # The generators in use only: torch.manual_seed sees to all kinds of devices, which takes a hundred times as long.
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
    random.seed(mixed)
    numpy.random.seed(mixed)
