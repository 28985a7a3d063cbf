"""How the ranks train together: the reducers, by the value of the key `horovod_reduce_type`.

Gradients are reduced for every update, which stands here, or parameters are averaged after N updates (`param_average.py`), or one
after the other (`PostLocal`). A new one is a file with a class as `reducer.py` describes, and a line in `REDUCERS`; if it has
keys of its own, `ReduceKeys` inherits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from hvdtrain.comm.base import Communicator, Op, Tensor
from hvdtrain.config.keys import ALONE, Section, Sections, declared, key, one_of
from hvdtrain.learner.base import LearnerKeys, ModelState, StatePart
from hvdtrain.learner.param_average import ParamAverage, ParamAverageKeys
from hvdtrain.learner.precision import PrecisionKeys
from hvdtrain.learner.reducer import (
    EpochStart,
    FinishedUpdate,
    Numbers,
    Reducer,
    ReducerClass,
    Traffic,
    UpdateCounts,
    average,
    average_buffers,
    averaged,
)
from hvdtrain.learner.wire import COMPRESSIONS, Sent, Wire, WireKeys, gradient_wire
from hvdtrain.runtime.timer import Timer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GradReduceKeys(WireKeys):
    """Reducing gradients."""

    average_gradients: bool = key(
        False,
        "grad: average gradients over the ranks instead of summing them",
        names=("horovod_avg_grad", "torch_distributed.avg_grad"),
    )


class GradReduce:
    """For every update, gradients are summed (or averaged) over the ranks, and every rank applies the same update.

    Args:
        wire: in what form gradients travel; None: as they are.
    """

    keys = GradReduceKeys
    updates_without_batch = True
    meets_every_update = True

    def __init__(self, comm: Communicator, timer: Timer, average: bool, wire: Wire | None = None) -> None:
        self._comm = comm
        self._wire = Wire(comm) if wire is None else wire
        self._timer = timer
        self._op: Op = "average" if average else "sum"
        self._counts = UpdateCounts(comm.size)
        self._traffic = Traffic(self._wire)

    @classmethod
    def from_keys(cls, keys: GradReduceKeys, comm: Communicator, timer: Timer) -> GradReduce:
        return cls(comm, timer, keys.average_gradients, gradient_wire(comm, keys))

    def describe(self) -> str:
        return f"gradients are {'averaged' if self._op == 'average' else 'summed'} for every update{self._wire.describe()}"

    def start_gradients(self, gradients: list[Tensor], *, name: str, owners: Sequence[int] | None = None) -> Any:
        return self._traffic.start(gradients, self._op, name=name, owners=owners)

    def finish_gradients(self, handle: Any) -> list[Tensor]:
        with self._timer.span("communication"):
            return self._traffic.finish(handle)

    def reduce_rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        all_values, all_indices = self._wire.gather_rows([values, indices], name=name)
        return (all_values / self._comm.size if self._op == "average" else all_values), all_indices

    def waited(self, seconds: float, sent: Sent) -> None:
        self._timer.book("communication", seconds)
        self._traffic.sent += self._wire.num_bytes(sent) if self._comm.size > 1 else 0

    def agree(self, value: T | None) -> T:
        return next(known for known in self._comm.gather(value, name="agree") if known is not None)

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        self._wire.begin(state)

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        self._counts.add(update.has_batch, update.ranks_with_batch)
        state.average_weights(1)

    def end_of_epoch(self, state: ModelState) -> None:
        with self._timer.span("parameter sync"):
            average_buffers(self._comm, state, self._counts)
        self._counts.reset()

    def differing(self) -> tuple[StatePart, ...]:
        kept: tuple[StatePart, ...] = ("kept",) if self._wire.keeps else ()
        return ("statistics", "counters", *kept) if self._counts.updates else kept

    def averaged(self, state: ModelState) -> AbstractContextManager[None]:
        if not self._counts.updates:
            return nullcontext()
        return averaged(state, {"statistics": lambda own: average(self._comm, own, self._counts, "saved.statistics")})

    def settle(self, state: ModelState) -> None:
        pass  # nothing is under way between updates

    def state(self) -> Numbers:
        return self._counts.state()

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        if same_ranks:
            self._counts.restore(state)
        else:
            self._wire.forget()

    def take_traffic(self) -> tuple[int, int]:
        return self._traffic.take()


class PostLocal:
    """A start with averaged gradients, before ranks train alone (post-local SGD: Lin et al., 2020).

    Weights change most in the beginning, so models that are trained alone drift apart most there. Optimizers' states are the same
    on all ranks when they part.

    Args:
        first: reduces gradients, and averages them.
        then: lets ranks update alone.
        steps: those of the whole training with `first`. An update belongs to the reducer that its first step has.
    """

    meets_every_update = False

    def __init__(self, first: Reducer, then: ParamAverage, steps: int) -> None:
        self._first = first
        self._then = then
        self._steps = steps
        self._now: Reducer = first

    def describe(self) -> str:
        return f"{self._first.describe()} of the first {self._steps} steps; then {self._then.describe()}"

    @property
    def updates_without_batch(self) -> bool:
        return self._now.updates_without_batch

    def start_gradients(self, gradients: list[Tensor], *, name: str, owners: Sequence[int] | None = None) -> Any:
        return self._now.start_gradients(gradients, name=name, owners=owners)

    def finish_gradients(self, handle: Any) -> list[Tensor]:
        return self._now.finish_gradients(handle)

    def reduce_rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        return self._now.reduce_rows(values, indices, name=name)

    def waited(self, seconds: float, sent: Sent) -> None:
        self._now.waited(seconds, sent)

    def agree(self, value: T | None) -> T:
        return self._now.agree(value)

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        self._now = self._first if start.step < self._steps else self._then
        self._now.begin_epoch(state, start)
        self._then.warn(start)

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        self._now.after_update(state, update)
        if self._now is self._first and update.step >= self._steps:
            self._first.end_of_epoch(state)  # buffers become the same, too
            self._then.take_anchor(state)
            self._now = self._then

    def end_of_epoch(self, state: ModelState) -> None:
        self._now.end_of_epoch(state)

    def differing(self) -> tuple[StatePart, ...]:
        return self._now.differing()

    def averaged(self, state: ModelState) -> AbstractContextManager[None]:
        return self._now.averaged(state)

    def settle(self, state: ModelState) -> None:
        self._now.settle(state)

    def state(self) -> Numbers:
        return {**self._now.state(), "gradients": self._now is self._first}

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        (self._first if state.get("gradients") else self._then).restore(state, same_ranks)

    def take_traffic(self) -> tuple[int, int]:
        one, other = self._first.take_traffic(), self._then.take_traffic()
        return one[0] + other[0], one[1] + other[1]


REDUCERS: dict[str, ReducerClass] = {"grad": GradReduce, "param": ParamAverage}
"""By the value of the key `horovod_reduce_type`."""

ONLY_PARAM = ("outer_optimizer", "sync_rule", "sync_delay", "sync_parts", "local_start")
"""Keys that mean nothing where gradients are reduced. (RETURNN's own two are ignored there, as in RETURNN.)"""


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
    reduce_type: str = key(
        "grad",
        "'grad': reduce gradients for every update; 'param': every rank updates alone, and parameters are averaged after N "
        "updates",
        one_of(REDUCERS),
        names=("horovod_reduce_type", "torch_distributed.reduce_type"),
    )
    learning_rate_scale: bool | Literal["divide", "multiply", "sqrt"] = key(
        False,
        "scale the learning rate by the number of ranks: True or 'divide', 'multiply', or 'sqrt' (times its root)",
        names=("horovod_scale_lr", "torch_distributed.scale_lr"),
    )
    dataset_distribution: Literal["shard", "random_seed_offset"] = key(
        "shard",
        "'shard': the ranks share an epoch's batches; 'random_seed_offset': each goes through all data in its own order",
        names=("horovod_dataset_distribution", "torch_distributed.dataset_distribution"),
    )
    horovod_timeline: str | None = key(
        None,
        "a file in which Horovod writes down when each collective ran, for chrome://tracing (HOROVOD_TIMELINE does the same)",
    )


@dataclass(frozen=True, kw_only=True)
class ReduceKeys(ParamAverageKeys, GradReduceKeys, RankKeys):
    """Training on several ranks."""

    def problems(self, others: Sections = ALONE) -> list[str]:
        found = super().problems(others)
        if self.use_horovod and self.torch_distributed is not None:
            found.append("use_horovod, torch_distributed: expected one of them, got both (++use_horovod 0 turns the former off)")
        if self.reduce_type == "grad":
            kind = others.spelling(ReduceKeys, "reduce_type")
            changed = [one for one in declared(ReduceKeys) if one.field in ONLY_PARAM and getattr(self, one.field) != one.default]
            names = [others.spelling(ReduceKeys, one.field) for one in changed]
            found += [f"{name}: expected {kind} = 'param', which has syncs, got 'grad'" for name in names]
        learner = others.get(LearnerKeys)
        if learner is not None and learner.sync_batch_norm and self.reduce_type != "grad":
            kind = self.reduce_type
            found.append(f"sync_batch_norm: expected reduce_type 'grad', got {kind!r}, with which every rank updates alone")
        return found + self._compression_problems(others)

    def _compression_problems(self, others: Sections) -> list[str]:
        chosen, where = COMPRESSIONS.get(self.compression or ""), others.spelling(ReduceKeys, "compression")
        if chosen is None:
            return []
        found = []
        if self.use_horovod and not chosen.over_horovod:
            can = " or ".join(repr(name) for name, one in COMPRESSIONS.items() if one.over_horovod)
            hint = "Horovod has no such type; torch_distributed has"
            found.append(f"{where}: expected {can} with use_horovod, got {self.compression!r} ({hint})")
        precision, learner = others.get(PrecisionKeys), others.get(LearnerKeys)
        if chosen.narrow is None and self.reduce_type != "grad":
            narrow = " or ".join(repr(name) for name, one in COMPRESSIONS.items() if one.narrow is not None)
            kind = self.reduce_type
            found.append(f"{where}: expected {narrow} with reduce_type {kind!r}, got {self.compression!r}")
        if chosen.narrow is None and precision is not None and not precision.problems():
            if precision.precision().loss_scale(precision.precision().dtype) is not None:
                found.append(
                    f"{where}: expected 'fp16' or 'bf16' with a scaled loss (float16, grad_scaler), got "
                    f"{self.compression!r}, which adds gradients to those of the next update"
                )
        is_checked = learner is None or learner.num_allowed_consec_invalid_gradient_steps is not None
        if not self.has_narrow_range or precision is None or precision.problems() or is_checked:
            return found
        if precision.precision().scaling is None:
            found.append(
                f"grad_scaler: expected 'auto' or a dict with {where} = {self.compression!r}, got None (a gradient too "
                "large for a message would make the model infinite; num_allowed_consec_invalid_gradient_steps would skip it)"
            )
        return found

    @property
    def without_effect(self) -> str:
        """A key that another one makes useless, and why; empty: there is none. It is no mistake: RETURNN's configs have both."""
        step, seconds = self.sync_steps, self.sync_seconds
        if self.reduce_type == "grad" and (step != 1 or seconds is not None):
            name = "horovod_param_sync_step" if seconds is None else "horovod_param_sync_time_diff"
            return f"{name}: of no effect with horovod_reduce_type = 'grad' (parameters are averaged with 'param')"
        if step != 1 and seconds is not None:
            return f"horovod_param_sync_step: of no effect beside horovod_param_sync_time_diff, {seconds:g} seconds"
        return ""

    @property
    def has_narrow_range(self) -> bool:
        """Whether gradients are sent, maybe in some steps only, in a type with a smaller range than theirs."""
        chosen = COMPRESSIONS.get(self.compression or "")
        sends_gradients = self.reduce_type == "grad" or self.local_start > 0
        return chosen is not None and chosen.needs_scale and sends_gradients

    def reducer(self, comm: Communicator, timer: Timer) -> Reducer:
        """The reducer that the keys choose."""
        chosen = REDUCERS[self.reduce_type].from_keys(self, comm, timer)
        if not isinstance(chosen, ParamAverage) or not self.local_start:
            return chosen
        together = GradReduce.from_keys(replace(self, average_gradients=True), comm, timer)
        return PostLocal(together, chosen, self.local_start)


def scale_learning_rate(learning_rate: float, rule: bool | str, size: int) -> float:
    """The effective learning rate under `horovod_scale_lr`.

    >>> scale_learning_rate(0.4, "divide", 4), scale_learning_rate(0.4, "sqrt", 4), scale_learning_rate(0.4, False, 4)
    (0.1, 0.8, 0.4)
    """
    factors = {"divide": 1 / size, "multiply": float(size), "sqrt": float(size) ** 0.5}
    return learning_rate * factors["divide" if rule is True else str(rule)] if rule else learning_rate
