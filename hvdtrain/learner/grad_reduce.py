"""The default reducer: gradients are reduced for every update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from hvdtrain.comm.base import Communicator, Op
from hvdtrain.comm.groups import single_rank
from hvdtrain.config.keys import key
from hvdtrain.learner.averaging import UpdateCounts, temporarily_average
from hvdtrain.learner.buffers import average_buffers, averaged_statistics
from hvdtrain.learner.compression import CompressionKeys, GradientCompressor, gradient_compressor
from hvdtrain.learner.model_state import ModelState, StatePart
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate, GradientExchange, Numbers, Reducer
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
        parts: tuple[StatePart, ...] = ("kept",) if self._compressor.is_stateful else ()
        return ("statistics", "counters", *parts) if self._counts.updates else parts

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


def describe_gradients(gradients: GradientExchange) -> str:
    """How gradients are reduced, for the log."""
    return (
        f"gradients are {'averaged' if gradients.op == 'average' else 'summed'} for every update{gradients.compressor.describe()}"
    )
