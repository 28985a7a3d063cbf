"""Averages of tensors over the ranks, weighted by how many batches each has had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hvdtrain.comm.base import Communicator, Tensor, all_reduce
from hvdtrain.comm.groups import RankGroup
from hvdtrain.learner.reducer import FinishedUpdate, Numbers

if TYPE_CHECKING:
    from hvdtrain.learner.model_state import ModelState, Role


class UpdateCounts:
    """Counts updates since the last sync for which this rank, and all ranks, had batches.

    Args:
        group: the ranks that are one model. Their batches are added up.

    Attributes:
        updates: the number of updates since the last sync.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.reset()

    def reset(self) -> None:
        self.updates = 0
        self._own = 0
        self._all: int | None = 0  # None: the ranks have to exchange their numbers

    def add(self, update: FinishedUpdate) -> None:
        self.updates += 1
        planned = update.had_batch is None
        self._own += sum(map(update.has_batch.__getitem__, self._group.ranks)) if planned else int(update.had_batch or False)
        self._all = self._all + update.has_batch.count(True) if planned and self._all is not None else None

    def state(self) -> dict[str, int | None]:
        return {"rounds": self.updates, "own": self._own, "all": self._all}  # the names in checkpoints

    def restore(self, state: Numbers) -> None:
        self.updates = state["rounds"]
        self._own = state["own"]
        self._all = state["all"]

    def weight(self) -> float:
        """This rank's or group's weight in an average: its share of the batches, and exactly 1 if all have the same share.

        Collective, if the plan does not say for how many updates the ranks had batches.
        """
        with_batch = self._own  # the updates for which this rank, or group, had a batch
        total = self._all
        if total is None:
            with_batch = sum(self._group.within.gather(with_batch, name="updates_within"))
            total = sum(self._group.between.gather(with_batch, name="updates"))
        return with_batch * self._group.between.size / total if total else 1.0


def apply_weight(tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
    """The tensors times a rank's weight, for a weighted average; the same tensors if the weight is 1.

    With weight 0, they are zeros also where 0 times a value is NaN: a power of 0 is 1 of every value (IEEE 754).
    """
    if weight == 1.0:
        return list(tensors)
    return [tensor * weight if weight else tensor**0 - 1 for tensor in tensors]


def average(comm: Communicator, tensors: Sequence[Tensor], counts: UpdateCounts, name: str) -> list[Tensor]:
    """Collective. The weighted average of each tensor over the ranks. Can overwrite the tensors, which saves a copy."""
    return all_reduce(comm, apply_weight(tensors, counts.weight()), "average", name=f"average.{name}")


def changed(named: Mapping[str, Tensor], change: Callable[[list[Tensor]], list[Tensor]]) -> dict[str, Tensor]:
    """What `change` returns for tensors, by name."""
    return dict(zip(named, change(list(named.values())), strict=True)) if named else {}


@contextmanager
def temporarily_average(state: ModelState, averages: Mapping[Role, Callable[[], Mapping[str, Tensor]]]) -> Iterator[None]:
    """Collective. Inside the `with` block, tensors of some roles are averages; each rank's own are restored afterwards.

    Args:
        averages: by role, returns the averages of some tensors by name; may overwrite the model's.
    """
    former = {role: changed(state.tensors(role), copy_tensors) for role in averages}
    try:
        for role, averaged in averages.items():
            state.set_tensors(role, averaged())
        yield
    finally:
        for role, tensors in former.items():
            state.set_tensors(role, tensors)


def copy_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, in any framework."""
    return [tensor * 1 for tensor in tensors]
