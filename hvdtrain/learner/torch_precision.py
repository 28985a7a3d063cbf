"""Computing in half precision with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.precision import Dtype

Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes what goes around the config's functions."""


def autocast_of(dtype: Dtype, device: torch.device) -> Autocast:
    """A context that lets operations which can do with it compute in a type. Raises: ConfigError, where the device cannot."""
    if dtype == "float32":
        return nullcontext  # a config may have an autocast of its own
    wanted = getattr(torch, dtype)
    can = torch.amp.autocast_mode.is_autocast_available(device.type)
    if not can or (device.type == "cuda" and dtype == "bfloat16" and not torch.cuda.is_bf16_supported()):
        raise ConfigError([f"mixed_precision: expected a type that {device} computes in, got {dtype!r}"])
    return lambda: torch.autocast(device.type, dtype=wanted)
