"""The reducers, by the value of the key `horovod_reduce_type`.

Gradients are reduced for every update (`GradReduce`); the plug-in `param_average` averages parameters after N updates. A new
reducer is a file with a class of `EpochSync` (`reducer.py`), its keys, and a line in the table of a plug-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import new_class
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.comm.base import Communicator
from hvdtrain.config.absent import absent
from hvdtrain.config.keys import ALONE, Section, Sections, key, one_of
from hvdtrain.config.plugins import Registry
from hvdtrain.errors import Problem, problem
from hvdtrain.learner.compression import COMPRESSIONS, CompressionKeys
from hvdtrain.learner.grad_reduce import GradReduce, GradReduceKeys
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.precision import PrecisionKeys
from hvdtrain.learner.reducer import Reducer, ReducerClass
from hvdtrain.runtime.timer import Timer

REDUCERS: Registry[ReducerClass] = Registry("reducers", {"grad": GradReduce})
"""By the value of the key `horovod_reduce_type`."""

KEYS_OF_REDUCERS = {name: reducer.keys for name, reducer in REDUCERS.items() if issubclass(reducer.keys, CompressionKeys)}

if TYPE_CHECKING:

    class ReducerKeys(GradReduceKeys):
        """The keys of all reducers."""
else:  # so that a new reducer's keys are keys of a config, too
    ReducerKeys = new_class("ReducerKeys", tuple(reducer.keys for reducer in reversed([*REDUCERS.values()])))


@dataclass(frozen=True, kw_only=True)
class RankKeys(Section):
    """Training on several ranks."""

    use_horovod: bool = key(False, "train with Horovod on the processes that mpirun, horovodrun or srun started")
    torch_distributed: dict[str, Any] | None = key(
        None,
        "train with torch.distributed instead, on the processes that torchrun, mpirun, srun or ngpu started: {}, or a dict "
        "of its entries (topic torchdistributed)",
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

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        problems = super().problems(sections)
        if self.use_horovod and self.torch_distributed is not None:
            problems += problem(
                "conflict",
                "use_horovod, torch_distributed: expected one of them, got both (++use_horovod 0 turns the former off)",
            )
        if self.use_horovod and (hint := absent("horovod")):
            problems += problem("unsupported", f"use_horovod: expected False, got True{hint}")
        kind = sections.spelling(ReduceKeys, "reduce_type")
        for reducer, keys in KEYS_OF_REDUCERS.items():
            for changed in keys.changed_of(self) if reducer != self.reduce_type else ():
                problems += problem(
                    "conflict",
                    f"{sections.spelling(ReduceKeys, changed)}: expected {kind} = {reducer!r}, which has syncs, got "
                    f"{self.reduce_type!r}",
                )
        return problems + self._compression_problems(sections)

    def _compression_problems(self, sections: Sections) -> list[Problem]:
        chosen = COMPRESSIONS.get(self.compression or "")
        where = sections.spelling(ReduceKeys, "compression")
        if chosen is None:
            return []
        problems = []
        if self.use_horovod and not chosen.over_horovod:
            can = " or ".join(repr(name) for name, compression in COMPRESSIONS.items() if compression.over_horovod)
            hint = "Horovod has no such type; torch_distributed has"
            problems += problem("conflict", f"{where}: expected {can} with use_horovod, got {self.compression!r} ({hint})")
        precision = sections.get(PrecisionKeys)
        learner = sections.get(LearnerKeys)
        kind = self.reduce_type
        suitable = {
            name: compression.bits is None if kind == "grad" else compression.narrow is not None or compression.bits is not None
            for name, compression in COMPRESSIONS.items()
            if compression.over_horovod or not self.use_horovod
        }
        if not suitable.get(self.compression or "", True):
            wanted = " or ".join(repr(name) for name, is_suitable in suitable.items() if is_suitable)
            problems += problem("conflict", f"{where}: expected {wanted} with reduce_type {kind!r}, got {self.compression!r}")
        if chosen.compressor is not None and chosen.bits is None and precision is not None and not precision.problems():
            if precision.precision().loss_scale(precision.precision().dtype) is not None:
                problems += problem(
                    "conflict",
                    f"{where}: expected 'fp16' or 'bf16' with a scaled loss (float16, grad_scaler), got "
                    f"{self.compression!r}, which adds gradients to those of the next update",
                )
        is_checked = learner is None or learner.num_allowed_consec_invalid_gradient_steps is not None
        if not self.has_narrow_range or precision is None or precision.problems() or is_checked:
            return problems
        if precision.precision().scaling is None:
            problems += problem(
                "conflict",
                f"grad_scaler: expected 'auto' or a dict with {where} = {self.compression!r}, got None (a gradient too "
                "large for a message would make the model infinite; num_allowed_consec_invalid_gradient_steps would skip it)",
            )
        return problems

    @property
    def updates_alone(self) -> bool:
        """Whether every rank makes all updates from its own gradients only."""
        return self.reduce_type != "grad" and super().updates_alone

    @property
    def has_narrow_range(self) -> bool:
        """Whether gradients are sent, at least in some steps, in a type with a smaller range."""
        chosen = COMPRESSIONS.get(self.compression or "")
        sends_gradients = self.reduce_type == "grad" or self.starts_with_gradients
        return chosen is not None and chosen.needs_scale and sends_gradients

    def reducer(self, comm: Communicator, timer: Timer) -> Reducer:
        """The reducer that the keys select."""
        return REDUCERS[self.reduce_type].from_keys(self, comm, timer)


def scale_learning_rate(learning_rate: float, rule: bool | str, size: int) -> float:
    """The effective learning rate under `horovod_scale_lr`.

    >>> scale_learning_rate(0.4, "divide", 4), scale_learning_rate(0.4, "sqrt", 4), scale_learning_rate(0.4, False, 4)
    (0.1, 0.8, 0.4)
    """
    factors = {"divide": 1 / size, "multiply": float(size), "sqrt": float(size) ** 0.5}
    return learning_rate * factors["divide" if rule is True else str(rule)] if rule else learning_rate
