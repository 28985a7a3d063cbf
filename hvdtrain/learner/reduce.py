"""How the ranks train together: the reducers, by the value of the key `horovod_reduce_type`.

Two stand here: gradients are reduced for every update, or parameters are averaged after N updates. A new one is a file with a
class as `reducer.py` describes, and a line in `REDUCERS`; if it has keys of its own, `ReduceKeys` inherits them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from hvdtrain.comm.base import Communicator, Op, Tensor
from hvdtrain.comm.keys import TorchDistributedKeys
from hvdtrain.config.keys import ALONE, Section, Sections, key, one_of, positive
from hvdtrain.learner.base import LearnerKeys, ModelState, StatePart
from hvdtrain.learner.precision import PrecisionKeys
from hvdtrain.learner.reducer import Reducer, ReducerClass, UpdateCounts, average, average_buffers, averaged
from hvdtrain.learner.wire import COMPRESSIONS, Wire, WireKeys, gradient_wire
from hvdtrain.runtime.timer import Timer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GradReduceKeys(WireKeys):
    """Reducing gradients."""

    horovod_avg_grad: bool = key(False, "grad: average gradients over the ranks instead of summing them")


class GradReduce:
    """For every update, gradients are summed (or averaged) over the ranks, and every rank applies the same update.

    Args:
        wire: in what form gradients travel; None: as they are.
    """

    keys = GradReduceKeys
    updates_without_batch = True

    def __init__(self, comm: Communicator, timer: Timer, average: bool, wire: Wire | None = None) -> None:
        self._comm = comm
        self._wire = Wire(comm) if wire is None else wire
        self._timer = timer
        self._op: Op = "average" if average else "sum"
        self._counts = UpdateCounts(comm.size)

    @classmethod
    def from_keys(cls, keys: GradReduceKeys, comm: Communicator, timer: Timer) -> GradReduce:
        return cls(comm, timer, keys.horovod_avg_grad, gradient_wire(comm, keys))

    def describe(self) -> str:
        return f"gradients are {'averaged' if self._op == 'average' else 'summed'} for every update{self._wire.describe()}"

    def start_gradients(self, gradients: list[Tensor], *, name: str, owners: Sequence[int] | None = None) -> Any:
        return self._wire.start(gradients, self._op, name=name, owners=owners)

    def finish_gradients(self, handle: Any) -> list[Tensor]:
        with self._timer.span("communication"):
            return self._wire.finish(handle)

    def reduce_rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        all_values, all_indices = self._wire.gather_rows([values, indices], name=name)
        return (all_values / self._comm.size if self._op == "average" else all_values), all_indices

    def waited(self, seconds: float) -> None:
        self._timer.book("communication", seconds)

    def agree(self, value: T | None) -> T:
        return next(known for known in self._comm.gather(value, name="agree") if known is not None)

    def after_update(self, state: ModelState, has_batch: bool, ranks_with_batch: int) -> None:
        self._counts.add(has_batch, ranks_with_batch)
        state.average_weights(1)

    def end_of_epoch(self, state: ModelState) -> None:
        with self._timer.span("parameter sync"):
            average_buffers(self._comm, state, self._counts)
        self._counts.reset()

    def differing(self) -> tuple[StatePart, ...]:
        return ("statistics", "counters") if self._counts.updates else ()

    def averaged(self, state: ModelState) -> AbstractContextManager[None]:
        return averaged(self._comm, state, self._counts, self.differing())

    def state(self) -> dict[str, int]:
        return self._counts.state()

    def restore(self, state: dict[str, int]) -> None:
        self._counts.restore(state)


@dataclass(frozen=True, kw_only=True)
class ParamAverageKeys(Section):
    """Averaging parameters."""

    horovod_param_sync_step: int = key(
        1, "param: average the parameters after every N updates of an epoch, and at its end; 100 is a good value", positive
    )
    horovod_param_sync_time_diff: float | None = key(
        None, "param: average the parameters about every N seconds instead of every horovod_param_sync_step updates", positive
    )


class ParamAverage:
    """Every rank updates alone; after N updates, and at the end of an epoch, parameters and floating-point buffers are averaged.

    A rank's weight in the average is the number of updates that it had batches for since the last one. With plain SGD and an
    average after every update, this is the averaging of gradients. (Local SGD: Stich, 2019; RETURNN's horovod_reduce_type
    "param".)

    Args:
        every: the number of updates between two averages.
        seconds: the time between two averages instead. At each average, rank 0 converts it to a number of updates by its own
            speed and sends that to the others: no step needs a message, and no clocks are compared.
    """

    keys = ParamAverageKeys
    updates_without_batch = False

    def __init__(self, comm: Communicator, timer: Timer, every: int, seconds: float | None = None) -> None:
        self._comm = comm
        self._timer = timer
        self._every = 1 if seconds is not None else every
        self._seconds = seconds
        self._counts = UpdateCounts(comm.size)
        self._last_sync = time.perf_counter()

    @classmethod
    def from_keys(cls, keys: ParamAverageKeys, comm: Communicator, timer: Timer) -> ParamAverage:
        return cls(comm, timer, keys.horovod_param_sync_step, keys.horovod_param_sync_time_diff)

    def describe(self) -> str:
        often = f"after every {self._every} updates" if self._seconds is None else f"about every {self._seconds:g} s"
        return f"parameters are averaged {often} and at the end of an epoch"

    def start_gradients(self, gradients: list[Tensor], *, name: str, owners: Sequence[int] | None = None) -> Any:
        return gradients

    def finish_gradients(self, handle: list[Tensor]) -> list[Tensor]:
        return handle

    def reduce_rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        return values, indices

    def waited(self, seconds: float) -> None:
        pass  # no step waits for other ranks

    def agree(self, value: T | None) -> T:
        return value  # type: ignore[return-value]  # only a rank with a batch asks, and it knows

    def after_update(self, state: ModelState, has_batch: bool, ranks_with_batch: int) -> None:
        self._counts.add(has_batch, ranks_with_batch)
        if self._counts.updates >= self._every:
            self._synchronize(state)

    def end_of_epoch(self, state: ModelState) -> None:
        if self._counts.updates:
            self._synchronize(state)

    def differing(self) -> tuple[StatePart, ...]:
        always: tuple[StatePart, ...] = ("optimizer",)  # its state is never averaged
        return ("parameters", "statistics", "counters", *always) if self._counts.updates else always

    def averaged(self, state: ModelState) -> AbstractContextManager[None]:
        return averaged(self._comm, state, self._counts, self.differing())

    def state(self) -> dict[str, int]:
        return {**self._counts.state(), "every": self._every}

    def restore(self, state: dict[str, int]) -> None:
        self._counts.restore(state)
        if self._seconds is not None:
            self._every = state["every"]

    def _synchronize(self, state: ModelState) -> None:
        with self._timer.span("parameter sync"):
            updates = self._counts.updates
            state.map_tensors("parameters", lambda tensors: average(self._comm, tensors, self._counts, "parameters"))
            average_buffers(self._comm, state, self._counts)
            self._counts.reset()
            state.average_weights(updates)
            if self._seconds is not None:
                now = time.perf_counter()
                wanted = max(1, round(self._seconds * updates / max(now - self._last_sync, 1e-9)))
                self._every = self._comm.gather(wanted, name="param_sync_step")[0]
                self._last_sync = now


REDUCERS: dict[str, ReducerClass] = {"grad": GradReduce, "param": ParamAverage}
"""By the value of the key `horovod_reduce_type`."""

reduce_type = one_of(REDUCERS)


@dataclass(frozen=True, kw_only=True)
class RankKeys(Section):
    """Training on several ranks."""

    use_horovod: bool = key(False, "train with Horovod on the processes that mpirun, horovodrun or srun started")
    torch_distributed: dict[str, Any] | None = key(
        None,
        "train with torch.distributed instead, on the processes that torchrun, mpirun, srun or ngpu started: {}, or a dict "
        "with entries below",
        needs="torch",
        instead="use_horovod connects it",
    )
    horovod_reduce_type: str = key(
        "grad",
        "'grad': reduce gradients for every update; 'param': every rank updates alone, and parameters are averaged after N "
        "updates",
        reduce_type,
    )
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


@dataclass(frozen=True, kw_only=True)
class ReduceKeys(ParamAverageKeys, GradReduceKeys, RankKeys):
    """Training on several ranks."""

    def problems(self, others: Sections = ALONE) -> list[str]:
        found = []
        if self.use_horovod and self.torch_distributed is not None:
            found.append("use_horovod, torch_distributed: expected one of them, got both (++use_horovod 0 turns the former off)")
        learner = others.get(LearnerKeys)
        if learner is not None and learner.sync_batch_norm and self.horovod_reduce_type != "grad":
            kind = self.horovod_reduce_type
            found.append(f"sync_batch_norm: expected reduce_type 'grad', got {kind!r}, with which every rank updates alone")
        return found + self._compression_problems(others)

    def _compression_problems(self, others: Sections) -> list[str]:
        chosen, where = COMPRESSIONS.get(self.horovod_compression or ""), "horovod_compression"
        if chosen is None:
            return []
        found = []
        if self.use_horovod and not chosen.over_horovod:
            can = " or ".join(repr(name) for name, one in COMPRESSIONS.items() if one.over_horovod)
            hint = "Horovod has no such type; torch_distributed has"
            found.append(f"{where}: expected {can} with use_horovod, got {self.horovod_compression!r} ({hint})")
        precision, learner = others.get(PrecisionKeys), others.get(LearnerKeys)
        is_checked = learner is None or learner.num_allowed_consec_invalid_gradient_steps is not None
        if not self.has_narrow_range or precision is None or precision.problems() or is_checked:
            return found
        if precision.precision().scaling is None:
            found.append(
                f"grad_scaler: expected 'auto' or a dict with {where} = {self.horovod_compression!r}, got None (a gradient too "
                "large for a message would make the model infinite; num_allowed_consec_invalid_gradient_steps would skip it)"
            )
        return found

    @property
    def has_narrow_range(self) -> bool:
        """Whether gradients are sent in a type with a smaller range than theirs."""
        chosen = COMPRESSIONS.get(self.horovod_compression or "")
        return chosen is not None and chosen.needs_scale and self.horovod_reduce_type == "grad"

    def under(self, keys: TorchDistributedKeys) -> ReduceKeys:
        """The keys as they hold with torch.distributed: an entry of its dict overrides the key of the same name."""
        entries: dict[str, Any] = {
            "horovod_reduce_type": keys.reduce_type,
            "horovod_avg_grad": keys.avg_grad,
            "horovod_param_sync_step": keys.param_sync_step,
            "horovod_param_sync_time_diff": keys.param_sync_time_diff,
            "horovod_scale_lr": keys.scale_lr,
            "horovod_dataset_distribution": keys.dataset_distribution,
            "horovod_compression": keys.compression,
        }
        return replace(self, **{name: value for name, value in entries.items() if value is not None})

    def reducer(self, comm: Communicator, timer: Timer) -> Reducer:
        """The reducer that the keys choose."""
        return REDUCERS[self.horovod_reduce_type].from_keys(self, comm, timer)


def scale_learning_rate(learning_rate: float, rule: bool | str, size: int) -> float:
    """The effective learning rate under `horovod_scale_lr`.

    >>> scale_learning_rate(0.4, "divide", 4), scale_learning_rate(0.4, "sqrt", 4), scale_learning_rate(0.4, False, 4)
    (0.1, 0.8, 0.4)
    """
    factors = {"divide": 1 / size, "multiply": float(size), "sqrt": float(size) ** 0.5}
    return learning_rate * factors["divide" if rule is True else str(rule)] if rule else learning_rate
