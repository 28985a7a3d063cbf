"""A rank's device: which one, its seeds, its clock, its memory, and computing in half precision."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Profiler
from hvdtrain.learner.precision import Dtype
from hvdtrain.learner.seeds import mixed_seed


def device_of(wanted: str | None, local_rank: int) -> torch.device:
    """Choose this rank's device and make it PyTorch's current one. Raises: ConfigError, if it does not exist."""
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


def device_name(device: torch.device) -> str:
    """The GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_memory(device: torch.device) -> int | None:
    """The largest number of bytes that PyTorch has reserved on a GPU so far; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def seed_all(device: torch.device, *parts: int) -> None:
    """Seed torch, Python and numpy with a number mixed from the parts."""
    mixed = mixed_seed(*parts)
    # Only the generators in use: torch.manual_seed seeds those of all kinds of devices, which takes a hundred times as long.
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
    random.seed(mixed)
    numpy.random.seed(mixed)


def be_deterministic() -> None:
    """Let PyTorch use operations that give the same bits in every run only; one that has none raises a RuntimeError."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # measures which algorithm is fastest, and takes another one next time


MAX_SPANS = 1000
"""Spans whose events are kept before the older ones are read."""


class OnTheWay:
    """A tensor's values on their way into host memory: the copy runs behind the kernels that compute them, and nobody waits."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values.detach().to("cpu", non_blocking=True)  # into pinned memory; a tensor on the CPU is not copied
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def has_arrived(self) -> bool:
        return self._copied is None or self._copied.query()  # type: ignore[no-untyped-call]

    def values(self) -> torch.Tensor:
        """The values on the CPU; waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


class CudaClock:
    """Seconds from the first to the last kernel of each span, measured by events on the device, so that no step waits for it."""

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
        if len(self._pairs) > MAX_SPANS and self._pairs[MAX_SPANS // 2][1].query():  # type: ignore[no-untyped-call]
            self._add(MAX_SPANS // 2)

    def take(self) -> float:
        """Wait for the last span's kernels; return the seconds of all spans since the last call."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
        self._add(len(self._pairs))
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _add(self, count: int) -> None:
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._pairs[:count]) / 1000
        del self._pairs[:count]


Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which the config's functions run."""


def autocast_of(dtype: Dtype, device: torch.device) -> Autocast:
    """Makes contexts in which operations that support it compute in a type. Raises: ConfigError, if the device cannot."""
    if dtype == "float32":
        return nullcontext  # the config may use torch.autocast itself
    wanted = getattr(torch, dtype)
    is_available = torch.amp.autocast_mode.is_autocast_available(device.type)
    if not is_available or (device.type == "cuda" and dtype == "bfloat16" and not torch.cuda.is_bf16_supported()):
        raise ConfigError([f"mixed_precision: expected a type that {device} computes in, got {dtype!r}"])
    return lambda: torch.autocast(device.type, dtype=wanted)


class _Profiler:
    """PyTorch's profiler: operators on the CPU, and on a GPU its kernels, too."""

    def __init__(self, on_gpu: bool) -> None:
        from torch import profiler  # here, as few trainings are profiled

        activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_gpu else [])]
        self._profile = profiler.profile(activities=activities)
        self._record = profiler.record_function

    def start(self) -> None:
        self._profile.start()

    def stop(self, file: Path) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(file))

    def range(self, name: str) -> AbstractContextManager[Any]:
        return self._record(name)


def profiler(on_gpu: bool) -> Profiler:
    """PyTorch's profiler."""
    return _Profiler(on_gpu)
