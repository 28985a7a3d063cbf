"""The reducers, by the value of the key `horovod_reduce_type`.

Gradients are reduced for every update (`GradReduce`), or parameters are averaged after N updates (`param_average.py`), or first
one, then the other (`PostLocal`). A new reducer is a file with a class of `EpochSync` (`reducer.py`), its keys, and a line in
`REDUCERS` or in the table of a plug-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import new_class
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.comm.base import Communicator, Op
from hvdtrain.comm.groups import single_rank
from hvdtrain.config.absent import absent
from hvdtrain.config.keys import ALONE, Section, Sections, declared_keys, key, one_of
from hvdtrain.config.plugins import Registry
from hvdtrain.errors import Problem, problem
from hvdtrain.learner.buffers import average_buffers, averaged_statistics
from hvdtrain.learner.compression import COMPRESSIONS, CompressionKeys, GradientCompressor, gradient_compressor
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.model_state import ModelState, StatePart
from hvdtrain.learner.param_average import ParamAverage, ParamAverageKeys
from hvdtrain.learner.precision import PrecisionKeys
from hvdtrain.learner.reducer import (
    EpochStart,
    EpochSync,
    FinishedUpdate,
    GradientExchange,
    Numbers,
    Reducer,
    ReducerClass,
    UpdateCounts,
    temporarily_average,
)
from hvdtrain.runtime.timer import Timer


@dataclass(frozen=True, kw_only=True)
class GradReduceKeys(CompressionKeys):
    """Reducing gradients."""

    average_gradients: bool = key(
        False,
        "grad: average gradients over the ranks instead of summing them",
        names=("horovod_avg_grad", "torch_distributed.avg_grad"),
    )


class GradReduce:
    """For every update, gradients are summed (or averaged) over the ranks, and every rank applies the same update.

    Parameters never differ, so only BatchNorm's statistics are synced, at the end of an epoch.
    """

    keys = GradReduceKeys
    num_syncs = 0
    sent = 0

    def __init__(self, comm: Communicator, timer: Timer, compressor: GradientCompressor) -> None:
        self._comm = comm
        self._timer = timer
        self._compressor = compressor
        self._counts = UpdateCounts(single_rank(comm))

    @classmethod
    def from_keys(cls, keys: GradReduceKeys, comm: Communicator, timer: Timer) -> Reducer:
        op: Op = "average" if keys.average_gradients else "sum"
        gradients = GradientExchange(comm, timer, op, gradient_compressor(comm, keys))
        return Reducer(gradients, cls(comm, timer, gradients.compressor), describe_gradients(gradients))

    @property
    def alike(self) -> Sequence[int]:
        return range(self._comm.size)

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        self._compressor.begin(state)

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        self._counts.add(update)
        state.average_weights(1)

    def end_of_epoch(self, state: ModelState) -> None:
        with self._timer.span("parameter sync"):
            average_buffers(self._comm, state, self._counts)
        self._counts.reset()

    def rank_local_state(self) -> tuple[StatePart, ...]:
        kept: tuple[StatePart, ...] = ("kept",) if self._compressor.is_stateful else ()
        return ("statistics", "counters", *kept) if self._counts.updates else kept

    def averaged_model(self, state: ModelState) -> AbstractContextManager[None]:
        if not self._counts.updates:
            return nullcontext()
        return temporarily_average(state, {"statistics": partial(averaged_statistics, self._comm, state, self._counts)})

    def flush(self, state: ModelState) -> None:
        pass  # nothing is under way between updates

    def state(self) -> Numbers:
        return self._counts.state()

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        if same_ranks:
            self._counts.restore(state)
        else:
            self._compressor.forget()


class PostLocal:
    """Averages gradients at first; then every rank trains alone (post-local SGD: Lin et al., 2020).

    Weights change most at the beginning, so models that are trained alone drift apart most there. At the switch, the optimizers
    have the same state on all ranks. An update belongs to the phase of its first step.

    Args:
        gradients: averages gradients in its first `steps`; switched on and off here.
        shared_phase: the sync of that phase.
        local_phase: the sync of the phase after that.
    """

    def __init__(self, gradients: GradientExchange, shared_phase: EpochSync, local_phase: ParamAverage) -> None:
        self._gradients = gradients
        self._shared_phase = shared_phase
        self._local_phase = local_phase

    @property
    def _phase(self) -> EpochSync:
        return self._shared_phase if self._gradients.is_active else self._local_phase

    @property
    def num_syncs(self) -> int:
        return self._local_phase.num_syncs

    @property
    def sent(self) -> int:
        return self._local_phase.sent

    @property
    def alike(self) -> Sequence[int]:
        return self._local_phase.alike

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        self._gradients.is_active = start.step < (self._gradients.steps or 0)
        self._phase.begin_epoch(state, start)
        self._local_phase.warn(start)

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        self._phase.after_update(state, update)
        if self._gradients.is_active and update.step >= (self._gradients.steps or 0):
            self._shared_phase.end_of_epoch(state)  # buffers become the same, too
            self._local_phase.take_over(state)
            self._gradients.is_active = False

    def end_of_epoch(self, state: ModelState) -> None:
        self._phase.end_of_epoch(state)

    def rank_local_state(self) -> tuple[StatePart, ...]:
        return self._phase.rank_local_state()

    def averaged_model(self, state: ModelState) -> AbstractContextManager[None]:
        return self._phase.averaged_model(state)

    def flush(self, state: ModelState) -> None:
        self._phase.flush(state)

    def state(self) -> Numbers:
        return {**self._phase.state(), "gradients": self._gradients.is_active}

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        (self._shared_phase if state.get("gradients") else self._local_phase).restore(state, same_ranks)


def describe_gradients(gradients: GradientExchange) -> str:
    """How gradients are reduced, for the log."""
    return (
        f"gradients are {'averaged' if gradients.op == 'average' else 'summed'} for every update{gradients.compressor.describe()}"
    )


REDUCERS: Registry[ReducerClass] = Registry("reducers", {"grad": GradReduce, "param": ParamAverage})
"""By the value of the key `horovod_reduce_type`."""

if TYPE_CHECKING:

    class ReducerKeys(ParamAverageKeys, GradReduceKeys):
        """The keys of all reducers."""
else:  # so that a new reducer's keys are keys of a config, too
    ReducerKeys = new_class("ReducerKeys", tuple(reducer.keys for reducer in reversed([*REDUCERS.values()])))

ONLY_PARAM = ("outer_optimizer", "sync_rule", "sync_delay", "sync_parts", "local_start", "group")
"""Keys that conflict with reduced gradients. (The two keys of the interval between syncs are ignored there.)"""


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
class ReduceKeys(ReducerKeys, RankKeys):
    """Training on several ranks."""

    def problems(self, others: Sections = ALONE) -> list[Problem]:
        found = super().problems(others)
        if self.use_horovod and self.torch_distributed is not None:
            found += problem(
                "conflict",
                "use_horovod, torch_distributed: expected one of them, got both (++use_horovod 0 turns the former off)",
            )
        if self.use_horovod and (hint := absent("horovod")):
            found += problem("unsupported", f"use_horovod: expected False, got True{hint}")
        if self.reduce_type == "grad":
            kind = others.spelling(ReduceKeys, "reduce_type")
            changed = [
                one for one in declared_keys(ReduceKeys) if one.field in ONLY_PARAM and getattr(self, one.field) != one.default
            ]
            names = [others.spelling(ReduceKeys, one.field) for one in changed]
            found += [Problem.of("conflict", f"{name}: expected {kind} = 'param', which has syncs, got 'grad'") for name in names]
        learner = others.get(LearnerKeys)
        if learner is not None and learner.sync_batch_norm and self.reduce_type != "grad":
            kind = self.reduce_type
            found += problem(
                "conflict", f"sync_batch_norm: expected reduce_type 'grad', got {kind!r}, with which every rank updates alone"
            )
        return found + self._compression_problems(others)

    def _compression_problems(self, others: Sections) -> list[Problem]:
        chosen, where = COMPRESSIONS.get(self.compression or ""), others.spelling(ReduceKeys, "compression")
        if chosen is None:
            return []
        found = []
        if self.use_horovod and not chosen.over_horovod:
            can = " or ".join(repr(name) for name, one in COMPRESSIONS.items() if one.over_horovod)
            hint = "Horovod has no such type; torch_distributed has"
            found += problem("conflict", f"{where}: expected {can} with use_horovod, got {self.compression!r} ({hint})")
        precision, learner = others.get(PrecisionKeys), others.get(LearnerKeys)
        kind = self.reduce_type
        suitable = {
            name: one.bits is None if kind == "grad" else one.narrow is not None or one.bits is not None
            for name, one in COMPRESSIONS.items()
            if one.over_horovod or not self.use_horovod
        }
        if not suitable.get(self.compression or "", True):
            wanted = " or ".join(repr(name) for name, is_suitable in suitable.items() if is_suitable)
            found += problem("conflict", f"{where}: expected {wanted} with reduce_type {kind!r}, got {self.compression!r}")
        if chosen.compressor is not None and chosen.bits is None and precision is not None and not precision.problems():
            if precision.precision().loss_scale(precision.precision().dtype) is not None:
                found += problem(
                    "conflict",
                    f"{where}: expected 'fp16' or 'bf16' with a scaled loss (float16, grad_scaler), got "
                    f"{self.compression!r}, which adds gradients to those of the next update",
                )
        is_checked = learner is None or learner.num_allowed_consec_invalid_gradient_steps is not None
        if not self.has_narrow_range or precision is None or precision.problems() or is_checked:
            return found
        if precision.precision().scaling is None:
            found += problem(
                "conflict",
                f"grad_scaler: expected 'auto' or a dict with {where} = {self.compression!r}, got None (a gradient too "
                "large for a message would make the model infinite; num_allowed_consec_invalid_gradient_steps would skip it)",
            )
        return found

    @property
    def updates_alone(self) -> bool:
        """Whether every rank makes all updates from its own gradients only."""
        return self.reduce_type != "grad" and self.group is None and not self.local_start

    @property
    def ignored_key_line(self) -> str:
        """The log line about a key that another key overrides; empty: there is none. No error, as published configs have both."""
        step, seconds = self.sync_steps, self.sync_seconds
        if self.reduce_type == "grad" and (step != 1 or seconds is not None):
            name = "horovod_param_sync_step" if seconds is None else "horovod_param_sync_time_diff"
            return f"{name}: no effect with horovod_reduce_type = 'grad' (parameters are averaged with 'param')"
        if step != 1 and seconds is not None:
            return f"horovod_param_sync_step: no effect with horovod_param_sync_time_diff = {seconds:g} seconds"
        return ""

    @property
    def has_narrow_range(self) -> bool:
        """Whether gradients are sent, at least in some steps, in a type with a smaller range."""
        chosen = COMPRESSIONS.get(self.compression or "")
        sends_gradients = self.reduce_type == "grad" or self.local_start > 0
        return chosen is not None and chosen.needs_scale and sends_gradients

    def reducer(self, comm: Communicator, timer: Timer) -> Reducer:
        """The reducer that the keys select."""
        chosen = REDUCERS[self.reduce_type].from_keys(self, comm, timer)
        if not isinstance(chosen.sync, ParamAverage) or not self.local_start:
            return chosen
        steps = self.local_start
        gradients = GradientExchange(comm, timer, "average", gradient_compressor(comm, self), steps)
        sync = PostLocal(gradients, GradReduce(comm, timer, gradients.compressor), chosen.sync)
        return Reducer(gradients, sync, f"{describe_gradients(gradients)} of the first {steps} steps; then {chosen.description}")


def scale_learning_rate(learning_rate: float, rule: bool | str, size: int) -> float:
    """The effective learning rate under `horovod_scale_lr`.

    >>> scale_learning_rate(0.4, "divide", 4), scale_learning_rate(0.4, "sqrt", 4), scale_learning_rate(0.4, False, 4)
    (0.1, 0.8, 0.4)
    """
    factors = {"divide": 1 / size, "multiply": float(size), "sqrt": float(size) ** 0.5}
    return learning_rate * factors["divide" if rule is True else str(rule)] if rule else learning_rate
