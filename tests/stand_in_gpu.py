"""A stand-in for a GPU: tensors whose device is cuda:0, computed on the CPU, and a list of what would wait for a real one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda:0")
aten = torch.ops.aten

READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""What needs a value on the host: the first stands behind item(), bool(), int() and float(), the others behind masks."""

LATE = 40
"""Kernels after which an event has come to pass: about as many as a step has."""


class OnGpu(torch.Tensor):
    """A tensor on the stand-in. Attributes: inner: the values, on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnGpu":
        made: OnGpu = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",  # to C++, which has no CUDA in a build for CPUs; autograd knows it
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def data(self) -> "OnGpu":  # type: ignore[override]
        return OnGpu(self.inner.detach())

    @data.setter
    def data(self, other: "OnGpu") -> None:
        self.inner = other.inner

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} outside of the stand-in")


class StandIn(TorchDispatchMode):
    """While it is active, tensors can be created on and copied to cuda:0.

    Attributes:
        waits: what a real GPU would have been waited for, or would have had to wait for the host's copying.
        kernels: the number of operations so far that would be started there.
        late: for each wait for an event, the number of operations that had been started behind it.
    """

    current: ClassVar["StandIn | None"] = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.late: list[int] = []
        self.kernels = 0
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, so that no other tensor gets it

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which is in pinned memory from now on."""
        self._pinned[tensor.data_ptr()] = tensor
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        wrappers = {id(one.inner): one for one in tensors if isinstance(one, OnGpu)}
        on_cpu = [one for one in tensors if not isinstance(one, OnGpu)]
        target = kwargs.get("device")
        goes_to_gpu = bool(wrappers) if target is None else torch.device(target).type in ("cuda", "meta")
        self._note(function, wrappers, on_cpu, args, kwargs, goes_to_gpu)
        self.kernels += (bool(wrappers) or goes_to_gpu) and not function.is_view
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if function is aten._to_copy.default:
            kwargs.pop("non_blocking", None)
        args, kwargs = tree_map(lambda one: one.inner if isinstance(one, OnGpu) else one, (args, kwargs))
        found = function(*args, **kwargs)
        if function in READS and function is not aten.nonzero.default:
            return found

        def wrapped(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            return wrappers.get(id(one)) if id(one) in wrappers else OnGpu(one) if goes_to_gpu else one

        return tree_map(wrapped, found)

    def _note(self, function: Any, wrappers: Any, on_cpu: list[torch.Tensor], args: Any, kwargs: Any, to_gpu: bool) -> None:
        """Note what waits; refuse operations on both devices."""
        if function in READS and wrappers:
            self.waits.append(str(function))
        elif function is aten._to_copy.default and to_gpu != bool(wrappers):
            is_free = kwargs.get("non_blocking", False) and (wrappers or args[0].data_ptr() in self._pinned)
            if not is_free:
                self.waits.append(f"{function} to the {'GPU' if to_gpu else 'CPU'} of {args[0].dtype}{list(args[0].shape)}")
        elif function is aten.copy_.default and wrappers and on_cpu:
            self.waits.append(f"{function} between the devices")
        elif function in (aten.index.Tensor, aten.index_put_.default) and wrappers:
            indices = [one for one in tree_flatten(args[1])[0] if isinstance(one, torch.Tensor)]
            if any(one.dtype == torch.bool or not isinstance(one, OnGpu) for one in indices):
                self.waits.append(f"{function} with a mask or an index from the CPU")
        elif wrappers and any(one.dim() for one in on_cpu):
            raise RuntimeError(f"{function}: expected all tensors to be on the same device, got cuda:0 and cpu")

    def __enter__(self) -> "StandIn":
        StandIn.current = self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *failure: Any) -> None:
        StandIn.current = None
        super().__exit__(*failure)


def _gpu() -> StandIn:
    assert StandIn.current is not None
    return StandIn.current


class Event:
    """torch.cuda.Event: it comes to pass when enough operations have been started behind it."""

    def __init__(self, **_: Any) -> None:
        self._at = 0

    def record(self, stream: Any = None) -> None:
        self._at = _gpu().kernels

    def query(self) -> bool:
        return _gpu().kernels - self._at >= LATE

    def synchronize(self) -> None:
        _gpu().late.append(_gpu().kernels - self._at)

    def elapsed_time(self, end: "Event") -> float:
        return 1000.0 * (end._at - self._at)


class Stream:
    """torch.cuda.Stream. Everything happens at once, in order."""

    def __init__(self, *_: Any) -> None:
        self.waited: list[Event] = []

    def record_event(self) -> Event:
        event = Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        _gpu().waits.append("Stream.synchronize")


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Inside the `with` block, this host has one GPU, the stand-in."""
    main = Stream()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        yield

    def synchronize(*_: Any) -> None:
        _gpu().waits.append("torch.cuda.synchronize")

    stand_ins: dict[str, Any] = {
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "set_device": lambda _: None,
        "get_device_name": lambda _: "stand-in",
        "max_memory_reserved": lambda _: 0,
        "manual_seed": lambda _: None,
        "_lazy_init": lambda: None,
        "current_stream": lambda *_: main,
        "stream": on,
        "synchronize": synchronize,
        "Event": Event,
        "Stream": Stream,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    # Optimizers ask it whether a graph is being captured; with a build for CUDA, that needs a driver.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(OnGpu, "record_stream", lambda self, stream: None, raising=False)
    load = torch.load

    def load_on(path: Any, map_location: Any, **options: Any) -> Any:
        stored = load(path, map_location="cpu", **options)
        return tree_map(lambda one: one.to(map_location) if isinstance(one, torch.Tensor) else one, stored)

    monkeypatch.setattr(torch, "load", load_on)
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)  # Module.to makes new parameters
    make = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:  # in any thread
        return active.pinned(make(*args, **kwargs)) if pin_memory else make(*args, **kwargs)

    with StandIn() as active:
        monkeypatch.setattr(torch, "empty", empty)
        yield active
