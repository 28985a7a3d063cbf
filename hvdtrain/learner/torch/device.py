"""A rank's device and how it computes: seeds, clock, memory, half precision, torch.compile, activation checkpointing."""

from __future__ import annotations

import functools
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from hvdtrain.config.check import did_you_mean
from hvdtrain.data.randomness import seed_generators
from hvdtrain.errors import ConfigError, Problem, problem, raised_text
from hvdtrain.learner.frameworks import gpu_of
from hvdtrain.learner.optimizer import class_names
from hvdtrain.learner.precision import Dtype
from hvdtrain.runtime import log


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
        self._values = values.detach().to("cpu", non_blocking=True)  # pinned memory; a CPU tensor is not copied
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


Watch = Callable[[], AbstractContextManager[None]]
"""Creates the context around calls that may compile the model."""

GRAPHS = 64
"""The number of kinds of input (one sequence, one frame, training, evaluation) that a function is compiled for. PyTorch's limit
of 8 is soon reached, and then the function runs uncompiled."""

SEVERAL_LOSSES = (
    "torch_compile: expected accum_grad_multiple_step = 1, or one loss only with use_normalized_loss, got several losses to "
    "accumulate: their gradients are computed one by one, but a compiled backward runs only once, as it overwrites its input"
)
"""With PyTorch's donated_buffer = False it could run twice, but the cache may hold code that overwrites the input (2.13)."""


def compile_model(model: torch.nn.Module, wanted: bool | dict[str, Any]) -> Watch:
    """Have a model compiled on its first call; return the function that creates the context for its calls.

    Args:
        wanted: the key torch_compile: whether to compile, or options of torch.compile and `modules`, the classes (or their names)
            of the modules to compile one by one instead of the whole model.

    Raises:
        ConfigError: torch.compile has no such option, or the model has no such modules.
    """
    if wanted is False:
        return lambda: NOTHING
    options = dict(wanted) if isinstance(wanted, dict) else {}
    modules = _select_modules(model, options.pop("modules")) if "modules" in options else [model]
    takes = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    problems = []
    for name in options.keys() - set(takes):
        hint = did_you_mean(name, [*takes, "modules"])
        problems += problem(
            "unknown-key", f"torch_compile.{name}: expected one of {', '.join(takes)}, modules, got {name!r}{hint}"
        )
    if problems:
        raise ConfigError(problems)
    usual = {"dynamic": True, "recompile_limit": GRAPHS}  # batches of any length share a graph
    options = {name: value for name, value in usual.items() if name in takes} | options
    try:
        for module in modules:
            _compile(module, options)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError.of("unknown-key", f"torch_compile: expected options of torch.compile, got {options}: {error}") from None
    return _CompileLog().watch


def _compile(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Compile a module. Module.compile skips PyTorch's code, such as Sequential.forward, so PyTorch's modules are compiled by
    their forward."""
    if type(module).__module__.startswith("torch.nn."):
        module.forward = torch.compile(module.forward, **options)
    else:
        module.compile(**options)


def _select_modules(model: torch.nn.Module, wanted: Any) -> list[torch.nn.Module]:
    """The model's modules of some classes, except those inside another such module, which are compiled with it."""
    classes = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    names = {cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2] for cls in classes}
    known = {name for module in model.modules() for name in class_names(module)}
    missing = sorted(names - known)
    if missing:
        hint = did_you_mean(missing[0], known)
        raise ConfigError.of(
            "unknown-value", f"torch_compile.modules: expected classes of the model's modules, got {missing[0]}{hint}"
        )
    chosen: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in chosen if outer) or "" in chosen
        if not is_inside and not names.isdisjoint(class_names(module)):
            chosen[path] = module
    return list(chosen.values())


class _CompileLog:
    """Logs the compile time, and translates errors."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seconds: list[float] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The context around calls that may compile. Raises: ConfigError, if there is no compiler."""
        from torch._dynamo import callback, exc  # here, as this import takes a second or two

        handler = callback.callback_handler
        handler.register_start_callback(self._begin)
        handler.register_end_callback(self._end)
        self._seconds = []
        try:
            yield
        except (exc.BackendCompilerFailed, exc.TorchDynamoException) as error:
            reason = _compile_error(error)
            raise ConfigError.of(
                "unavailable",
                f"torch_compile: expected PyTorch to compile the model, got: {reason} (a C++ compiler such as g++, or Triton "
                "on a GPU, is required; torch_compile = False needs none)",
            ) from error
        except RuntimeError as error:
            if "donated buffer" not in str(error):
                raise
            raise ConfigError.of("wrong-result", SEVERAL_LOSSES) from error
        finally:
            handler.remove_start_callback(self._begin)
            handler.remove_end_callback(self._end)
        if self._seconds:
            several = "s" if len(self._seconds) > 1 else ""
            log.detail(f"torch.compile: {len(self._seconds)} graph{several} in {sum(self._seconds):.1f} s")

    def _begin(self, _: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, _: Any) -> None:
        self._seconds.append(time.perf_counter() - self._began)


def _compile_error(error: Exception) -> str:
    """The first line of what PyTorch says, or of the exception of the compiler that it leaves out there."""
    said = str(error).strip().splitlines()[0].strip()
    return raised_text(getattr(error, "inner_exception", error)).splitlines()[0] if said.endswith(":") else said


def checkpoint_activations(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Let modules recompute their activations in backward instead of keeping them (Chen et al., 2016).

    Random numbers are the same both times, and so are gradients. Names in checkpoints do not change.

    Args:
        patterns: patterns of module names, such as 'encoder.*'; a module inside another such module is checkpointed with it.

    Raises:
        ConfigError: no module matches a pattern, or one cannot be computed twice.
    """
    chosen: dict[str, torch.nn.Module] = {}
    matched: set[str] = set()
    for path, module in model.named_modules():
        matching = {pattern for pattern in patterns if path and fnmatchcase(path, pattern)}
        matched |= matching
        if matching and not any(path.startswith(f"{outer}.") for outer in chosen):
            chosen[path] = module
    names = [name for name, _ in model.named_modules() if name]
    problems = [
        Problem.of(
            "unknown-value",
            f"checkpoint_modules: expected names of the model's modules, such as {', '.join(names[:4])}, got {pattern!r}",
        )
        for pattern in patterns
        if pattern not in matched
    ]
    for path, module in chosen.items():
        if isinstance(module, CONTAINERS):
            kind = type(module).__name__
            problems += problem(
                "wrong-result", f"checkpoint_modules: expected modules that are called, got the {kind} {path} (try {path}.*)"
            )
        if any(isinstance(inner, _BatchNorm) and inner.track_running_stats for inner in module.modules()):
            problems += problem(
                "wrong-result",
                f"checkpoint_modules: expected modules without BatchNorm, whose statistics would be updated twice, got {path}",
            )
    if problems:
        raise ConfigError(problems)
    for module in chosen.values():
        module.forward = _checkpoint_forward(module, module.forward)


CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def _checkpoint_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return compute
