"""The device, its threads, seeds, clock and precision."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy
import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.precision import Dtype
from hvdtrain.learner.seeds import mixed_seed


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


MANY = 1000
"""Spans that wait for their events before some of them are read."""


class CudaClock:
    """Seconds from the first to the last kernel of each span, by events on the device: no step waits for it."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pairs.append((begin, end))
        if len(self._pairs) > MANY and self._pairs[MANY // 2][1].query():  # type: ignore[no-untyped-call]
            self._add(MANY // 2)

    def take(self) -> float:
        torch.cuda.synchronize()
        self._add(len(self._pairs))
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _add(self, count: int) -> None:
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._pairs[:count]) / 1000
        del self._pairs[:count]


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
