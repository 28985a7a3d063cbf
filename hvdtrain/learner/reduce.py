"""How the ranks learn together: gradients every step, or parameters every N updates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from hvdtrain.comm.base import Communicator, Op, Tensor, all_reduce
from hvdtrain.comm.keys import TorchDistributedKeys
from hvdtrain.config.keys import ALONE, Section, Sections, key, positive
from hvdtrain.learner.base import Kind, Learner, Part
from hvdtrain.runtime.timer import Timer

T = TypeVar("T")

AVERAGED: tuple[Kind, ...] = ("parameters", "statistics")
"""What is averaged where parameters are; counters are taken from rank 0."""


@dataclass(frozen=True, kw_only=True)
class ReduceKeys(Section):
    """Training on several ranks."""

    use_horovod: bool = key(False, "train with Horovod on the processes that mpirun, horovodrun or srun started")
    torch_distributed: dict[str, Any] | None = key(
        None,
        "train with torch.distributed instead, on the processes that torchrun, mpirun, srun or ngpu started: {}, or a dict "
        "with entries below",
    )
    horovod_reduce_type: Literal["grad", "param"] = key(
        "grad", "'grad': reduce gradients every step; 'param': every rank updates alone, parameters are averaged now and then"
    )
    horovod_avg_grad: bool = key(False, "average gradients over the ranks instead of summing them")
    horovod_param_sync_step: int = key(
        1, "param: average after so many updates of the epoch, and at its end; 100 is good", positive
    )
    horovod_param_sync_time_diff: float | None = key(None, "param: average every so many seconds instead of steps", positive)
    horovod_scale_lr: bool | Literal["divide", "multiply", "sqrt"] = key(
        False, "scale the learning rate by the number of ranks: True or 'divide', 'multiply', or 'sqrt' (times its root)"
    )
    horovod_dataset_distribution: Literal["shard", "random_seed_offset"] = key(
        "shard", "'shard': the ranks share an epoch's batches; 'random_seed_offset': each goes through all data in its own order"
    )
    horovod_timeline: str | None = key(
        None,
        "a file in which Horovod writes down when each collective ran, for chrome://tracing (HOROVOD_TIMELINE does the same)",
    )

    def problems(self, others: Sections = ALONE) -> list[str]:
        if self.use_horovod and self.torch_distributed is not None:
            return ["use_horovod, torch_distributed: expected one of them, got both (++use_horovod 0 turns the former off)"]
        return []

    def under(self, keys: TorchDistributedKeys) -> ReduceKeys:
        """The keys as they hold with torch.distributed: what its dict says goes before the key of the same name."""
        entries: dict[str, Any] = {
            "horovod_reduce_type": keys.reduce_type,
            "horovod_avg_grad": keys.avg_grad,
            "horovod_param_sync_step": keys.param_sync_step,
            "horovod_param_sync_time_diff": keys.param_sync_time_diff,
            "horovod_scale_lr": keys.scale_lr,
            "horovod_dataset_distribution": keys.dataset_distribution,
        }
        return replace(self, **{name: value for name, value in entries.items() if value is not None})


class Reducer(Protocol):
    """The contract of this file's classes."""

    def start_gradients(self, gradients: list[Tensor], *, name: str) -> Any:
        """Hand over gradients as soon as they are there; they may be overwritten. Returns a handle.

        Counts of loss elements go the same way: where gradients are averaged, so are they, and the two factors cancel.
        """
        ...

    def finish_gradients(self, handle: Any) -> list[Tensor]:
        """The gradients that the optimizer is to apply."""
        ...

    def reduce_rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        """Rows of a sparse gradient and which rows they are, on all ranks together; a rank may have none."""
        ...

    def waited(self, seconds: float) -> None:
        """Be told how long a step waited for other ranks, where that could not be seen from here."""
        ...

    def agree(self, value: T | None) -> T:
        """Something every rank with a batch knows alike: rank by rank, the first that is not None. Once a training."""
        ...

    @property
    def updates_without_batch(self) -> bool:
        """Whether a rank that has no batch left in the last round applies an update all the same."""
        ...

    def after_update(self, learner: Learner, has_batch: bool, ranks_with_batch: int) -> None:
        """Called after every update, by all ranks.

        Args:
            has_batch: whether this rank had a batch for it.
            ranks_with_batch: how many ranks had one; known from the plan.
        """
        ...

    def end_of_epoch(self, learner: Learner) -> None:
        """Make the model the same on all ranks."""
        ...

    def differing(self) -> tuple[Part, ...]:
        """What may differ between the ranks at this moment, so that a checkpoint needs every rank's own."""
        ...

    def averaged(self, learner: Learner) -> AbstractContextManager[None]:
        """Collective. Inside the `with` block the model is what the ranks have in common; behind it, what it was before."""
        ...

    def state(self) -> dict[str, int]:
        """What this rank has to remember to go on as if it had not been stopped."""
        ...

    def restore(self, state: dict[str, int]) -> None:
        """Go on from what `state` returned."""
        ...


class GradReduce:
    """Every step, gradients are summed (or averaged) over the ranks, and every rank applies the same update."""

    updates_without_batch = True

    def __init__(self, comm: Communicator, timer: Timer, average: bool) -> None:
        self._comm = comm
        self._timer = timer
        self._op: Op = "average" if average else "sum"
        self._weights = _Weights(comm.size)

    def start_gradients(self, gradients: list[Tensor], *, name: str) -> Any:
        return self._comm.start(gradients, self._op, name=name)

    def finish_gradients(self, handle: Any) -> list[Tensor]:
        with self._timer.span("communication"):
            return self._comm.finish(handle)

    def reduce_rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        everybodys, theirs = self._comm.gather_rows([values, indices], name=name)
        return (everybodys / self._comm.size if self._op == "average" else everybodys), theirs

    def waited(self, seconds: float) -> None:
        self._timer.book("communication", seconds)

    def agree(self, value: T | None) -> T:
        return next(known for known in self._comm.gather(value, name="agree") if known is not None)

    def after_update(self, learner: Learner, has_batch: bool, ranks_with_batch: int) -> None:
        self._weights.count(has_batch, ranks_with_batch)
        learner.average_weights(1)

    def end_of_epoch(self, learner: Learner) -> None:
        with self._timer.span("parameter sync"):
            _average_buffers(self._comm, learner, self._weights)
        self._weights.reset()

    def differing(self) -> tuple[Part, ...]:
        return ("statistics", "counters") if self._weights.rounds else ()

    def averaged(self, learner: Learner) -> AbstractContextManager[None]:
        return _averaged(self._comm, learner, self._weights, self.differing())

    def state(self) -> dict[str, int]:
        return self._weights.state()

    def restore(self, state: dict[str, int]) -> None:
        self._weights.restore(state)


class ParamAverage:
    """Every rank updates alone; now and then, and at an epoch's end, parameters and floating buffers are averaged.

    Ranks weigh by the updates they did since the last time. With plain SGD and a sync after every update this is the
    averaging of gradients. (Local SGD: Stich, 2019; RETURNN's horovod_reduce_type "param".)

    Args:
        every: updates between two syncs.
        seconds: time between two syncs instead. At each sync rank 0 turns it into a number of updates by its own speed
            and tells the others, so that no step needs a message and no clocks are compared.
    """

    updates_without_batch = False

    def __init__(self, comm: Communicator, timer: Timer, every: int, seconds: float | None = None) -> None:
        self._comm = comm
        self._timer = timer
        self._every = 1 if seconds is not None else every
        self._seconds = seconds
        self._weights = _Weights(comm.size)
        self._last_sync = time.perf_counter()

    def start_gradients(self, gradients: list[Tensor], *, name: str) -> Any:
        return gradients

    def finish_gradients(self, handle: list[Tensor]) -> list[Tensor]:
        return handle

    def reduce_rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        return values, indices

    def waited(self, seconds: float) -> None:
        pass  # a step of its own waits for nobody

    def agree(self, value: T | None) -> T:
        return value  # type: ignore[return-value]  # only a rank with a batch asks, and it knows

    def after_update(self, learner: Learner, has_batch: bool, ranks_with_batch: int) -> None:
        self._weights.count(has_batch, ranks_with_batch)
        if self._weights.rounds >= self._every:
            self._synchronize(learner)

    def end_of_epoch(self, learner: Learner) -> None:
        if self._weights.rounds:
            self._synchronize(learner)

    def differing(self) -> tuple[Part, ...]:
        always: tuple[Part, ...] = ("optimizer",)  # its state is never averaged
        return ("parameters", "statistics", "counters", *always) if self._weights.rounds else always

    def averaged(self, learner: Learner) -> AbstractContextManager[None]:
        return _averaged(self._comm, learner, self._weights, self.differing())

    def state(self) -> dict[str, int]:
        return {**self._weights.state(), "every": self._every}

    def restore(self, state: dict[str, int]) -> None:
        self._weights.restore(state)
        if self._seconds is not None:
            self._every = state["every"]

    def _synchronize(self, learner: Learner) -> None:
        with self._timer.span("parameter sync"):
            rounds = self._weights.rounds
            learner.map_tensors("parameters", lambda tensors: _average(self._comm, tensors, self._weights, "parameters"))
            _average_buffers(self._comm, learner, self._weights)
            self._weights.reset()
            learner.average_weights(rounds)
            if self._seconds is not None:
                now = time.perf_counter()
                wanted = max(1, round(self._seconds * rounds / max(now - self._last_sync, 1e-9)))
                self._every = self._comm.gather(wanted, name="param_sync_step")[0]
                self._last_sync = now


class _Weights:
    """How many updates this rank and all ranks did since the last sync; arithmetic on the plan, no message."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.reset()

    def reset(self) -> None:
        self.rounds = 0
        self._own = 0
        self._all = 0

    def count(self, has_batch: bool, ranks_with_batch: int) -> None:
        self.rounds += 1
        self._own += int(has_batch)
        self._all += ranks_with_batch

    def state(self) -> dict[str, int]:
        return {"rounds": self.rounds, "own": self._own, "all": self._all}

    def restore(self, state: dict[str, int]) -> None:
        self.rounds, self._own, self._all = state["rounds"], state["own"], state["all"]

    def factor(self) -> float:
        """What this rank's values are multiplied by before they are averaged; exactly 1 where all did equally much."""
        return self._own * self._size / self._all if self._all else 1.0


def _average(comm: Communicator, tensors: Sequence[Tensor], weights: _Weights, name: str) -> list[Tensor]:
    """Collective. The weighted mean of every tensor over the ranks."""
    factor = weights.factor()
    return all_reduce(comm, [tensor * factor for tensor in tensors], "average", name=f"average.{name}")


def _average_buffers(comm: Communicator, learner: Learner, weights: _Weights) -> None:
    """Collective. Floating buffers are averaged, integer ones taken from rank 0."""
    learner.map_tensors("statistics", lambda tensors: _average(comm, tensors, weights, "statistics"))
    learner.map_tensors("counters", lambda tensors: comm.broadcast(tensors, name="counters"))


@contextmanager
def _averaged(comm: Communicator, learner: Learner, weights: _Weights, parts: Sequence[Part]) -> Iterator[None]:
    """Collective. Average what differs, and give every rank its own back afterwards. (Counters are rank 0's anyhow.)"""
    kinds: list[Kind] = [kind for kind in AVERAGED if kind in parts]
    own: dict[Kind, list[Tensor]] = {}

    def average(kind: Kind, tensors: list[Tensor]) -> list[Tensor]:
        own[kind] = [tensor * 1 for tensor in tensors]  # copies
        return _average(comm, tensors, weights, f"saved.{kind}")

    for kind in kinds:
        learner.map_tensors(kind, lambda tensors, kind=kind: average(kind, tensors))  # type: ignore[misc]
    yield
    for kind in kinds:
        learner.map_tensors(kind, lambda _, kind=kind: own[kind])  # type: ignore[misc]


def scale_learning_rate(learning_rate: float, rule: bool | str, size: int) -> float:
    """The effective learning rate under `horovod_scale_lr`.

    >>> scale_learning_rate(0.4, "divide", 4), scale_learning_rate(0.4, "sqrt", 4), scale_learning_rate(0.4, False, 4)
    (0.1, 0.8, 0.4)
    """
    factors = {"divide": 1 / size, "multiply": float(size), "sqrt": float(size) ** 0.5}
    return learning_rate * factors["divide" if rule is True else str(rule)] if rule else learning_rate


BUCKET_BYTES = 2 << 20
"""Gradients of about so many bytes are sent together: large enough for the network, small enough to start early."""


def buckets(kinds: Sequence[tuple[int, object]]) -> list[list[int]]:
    """The parameters' numbers in groups of one type and about BUCKET_BYTES, last parameter first.

    Args:
        kinds: of every parameter in the model's order: bytes and type.

    >>> buckets([(1 << 20, "float32"), (2 << 20, "float32"), (8, "float32"), (8, "float64")])
    [[3], [2], [1], [0]]
    >>> buckets([(8, "float32"), (8, "float32")])
    [[1, 0]]
    """
    groups: list[list[int]] = []
    size = 0
    for number in reversed(range(len(kinds))):
        bytes_here, kind = kinds[number]
        if not groups or size + bytes_here > BUCKET_BYTES or kind != kinds[groups[-1][0]][1]:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += bytes_here
    return groups
