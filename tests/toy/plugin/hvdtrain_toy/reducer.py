"""A reducer: every rank updates alone, and parameters are averaged at the end of an epoch only."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from hvdtrain.comm.base import Communicator, Tensor
from hvdtrain.comm.groups import single_rank
from hvdtrain.config.keys import Section, key, share
from hvdtrain.learner.averaging import UpdateCounts, average, changed, copy_tensors, temporarily_average
from hvdtrain.learner.buffers import average_buffers
from hvdtrain.learner.model_state import ModelState, StatePart
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate, GradientExchange, Numbers, Reducer
from hvdtrain.runtime.timer import Timer


@dataclass(frozen=True, kw_only=True)
class EpochAverageKeys(Section):
    """Averaging at the end of an epoch."""

    epoch_share: float = key(
        0.5, "epoch: the share of the average in the new model; the rest is the model before the epoch", share
    )


class EpochAverage:
    """Averages parameters at the end of an epoch, and moves the model towards the average."""

    keys = EpochAverageKeys
    sent = 0

    def __init__(self, comm: Communicator, share: float) -> None:
        self._comm = comm
        self._share = share
        self._counts = UpdateCounts(single_rank(comm))
        self.alike = [comm.rank]
        self.num_syncs = 0

    @classmethod
    def from_keys(cls, keys: EpochAverageKeys, comm: Communicator, timer: Timer) -> Reducer:
        return Reducer(GradientExchange(comm, timer, steps=0), cls(comm, keys.epoch_share), "parameters are averaged in the end")

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        if not start.is_resumed:
            state.shared["before"] = copy_tensors(list(state.tensors("parameters").values()))

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        self._counts.add(update)

    def end_of_epoch(self, state: ModelState) -> None:
        means = zip(self._averages(state, "epoch").items(), state.shared["before"], strict=True)
        moved = {name: self._share * mean + (1 - self._share) * before for (name, mean), before in means}
        state.set_tensors("parameters", moved)
        average_buffers(self._comm, state, self._counts)
        self._counts.reset()
        self.num_syncs += 1

    def rank_local_state(self) -> tuple[StatePart, ...]:
        return ("parameters", "statistics", "counters", "optimizer") if self._counts.updates else ("optimizer",)

    def averaged_model(self, state: ModelState) -> AbstractContextManager[None]:
        return temporarily_average(state, {"parameters": lambda: self._averages(state, "saved")})

    def _averages(self, state: ModelState, name: str) -> dict[str, Tensor]:
        return changed(state.tensors("parameters"), lambda tensors: average(self._comm, tensors, self._counts, name))

    def flush(self, state: ModelState) -> None:
        pass

    def state(self) -> Numbers:
        return self._counts.state()

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        if same_ranks:
            self._counts.restore(state)
