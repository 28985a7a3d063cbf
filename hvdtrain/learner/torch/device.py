"""A rank's device and how it computes: seeds, clock, memory, half precision."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hvdtrain.data.process_generators import seed_generators
from hvdtrain.errors import ConfigError
from hvdtrain.learner.frameworks import gpu_of
from hvdtrain.learner.precision import Dtype


def device_of(wanted: str | None, local_rank: int) -> torch.device:
    """Choose this rank's device and make it PyTorch's current one. Raises: ConfigError, if it does not exist."""
    number = gpu_of(wanted, torch.cuda.device_count(), local_rank)
    device = torch.device("cpu" if number is None else f"cuda:{number}")
    if number is not None:
        torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """The GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory did not suffice, of a GPU or, where the system limits it, of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def free_memory(device: torch.device) -> None:
    """Return what no tensor uses any more from PyTorch's cache to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory(device: torch.device) -> int | None:
    """The peak memory that PyTorch has reserved on a GPU so far, in bytes; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def seed_all(device: torch.device, seed: int) -> None:
    """Seed the generators of torch on the device and the CPU, of Python and of numpy."""
    seed_generators(seed)  # torch.manual_seed would seed those of all device types, which takes a hundred times as long
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def enable_determinism() -> None:
    """Restrict PyTorch to operations that give the same bits in every run; others raise a RuntimeError."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it measures which algorithm is fastest, so that runs may differ


MAX_SPANS = 1000
"""The number of spans to keep before the older half is read."""


class AsyncCopy:
    """An asynchronous copy of a tensor to host memory, which starts once the tensor is computed; the host does not wait."""

    def __init__(self, values: torch.Tensor) -> None:
        detached = values.detach()
        self._values = detached if detached.is_cpu else detached.to("cpu", non_blocking=True)  # pinned memory
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def has_arrived(self) -> bool:
        return self._copied is None or self._copied.query()  # type: ignore[no-untyped-call]

    def values(self) -> torch.Tensor:
        """The values on the CPU; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


class CudaClock:
    """Measures the seconds from the first to the last kernel of each span with device events, so that no step waits."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0
        self._total = 0.0

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
        seconds, self._seconds = self._seconds, 0.0
        self._total += seconds
        return seconds

    def known_seconds(self) -> float:
        """The seconds of all spans whose last kernel has run; does not wait."""
        finished = [end.query() for _, end in self._pairs]  # type: ignore[no-untyped-call]
        self._add(finished.index(False) if False in finished else len(finished))
        return self._total + self._seconds

    def _add(self, count: int) -> None:
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._pairs[:count]) / 1000
        del self._pairs[:count]


NOTHING = nullcontext()

Autocast = Callable[[], AbstractContextManager[Any]]
"""Creates the context in which the config's functions run."""


def autocast_of(dtype: Dtype, device: torch.device) -> Autocast:
    """The function that creates contexts in which operations compute in a type, if they support it.

    Raises: ConfigError, if the device does not support the type."""
    if dtype == "float32":
        return lambda: NOTHING  # the config may use torch.autocast itself
    wanted = getattr(torch, dtype)
    is_available = torch.amp.autocast_mode.is_autocast_available(device.type)
    if not is_available or (device.type == "cuda" and dtype == "bfloat16" and not torch.cuda.is_bf16_supported()):
        raise ConfigError.of("unavailable", f"mixed_precision: expected a type that {device} computes in, got {dtype!r}")
    return (
        functools.partial(_autocast_on_cpu, wanted) if device.type == "cpu" else lambda: torch.autocast(device.type, dtype=wanted)
    )


@contextmanager
def _autocast_on_cpu(dtype: torch.dtype) -> Iterator[None]:
    """Without the fast path of nn.Transformer's layers in evaluations, which fails there; on a GPU, autocast itself avoids it."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.autocast("cpu", dtype=dtype):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
