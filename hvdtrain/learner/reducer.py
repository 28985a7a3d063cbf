"""What a reducer is, and what several of them need. The table of reducers stands in `reduce.py`.

A reducer decides what the ranks exchange so that they train one model. Gradients go through it on their way from backward to the
optimizer; after every update it may change the model's tensors. It sees gradients and the model's state, never the learner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from hvdtrain.comm.base import Communicator, Tensor, all_reduce
from hvdtrain.learner.base import Kind, ModelState, StatePart
from hvdtrain.runtime.timer import Timer

T = TypeVar("T")


class Reducer(Protocol):
    """How the ranks train together."""

    def describe(self) -> str:
        """What the ranks exchange and how often, for the log."""
        ...

    def start_gradients(self, gradients: list[Tensor], *, name: str, owners: Sequence[int] | None = None) -> Any:
        """Start to reduce gradients, which may be overwritten. Returns a handle.

        Counts of loss elements go the same way: if gradients are averaged, so are the counts, and the two factors cancel.

        Args:
            owners: for each gradient the only rank that needs it reduced. None: all ranks need all.
        """
        ...

    def finish_gradients(self, handle: Any) -> list[Tensor]:
        """The gradients that the optimizer applies."""
        ...

    def reduce_rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        """The rows of a sparse gradient of all ranks, and the numbers of these rows; a rank may have none."""
        ...

    def waited(self, seconds: float) -> None:
        """Record the seconds that a step waited for other ranks inside of a graph, where the reducer cannot measure them."""
        ...

    def agree(self, value: T | None) -> T:
        """A value that is the same on all ranks that know it: the first that is not None, by rank. Called once in a training."""
        ...

    @property
    def updates_without_batch(self) -> bool:
        """Whether a rank without a batch for an update applies the update as well."""
        ...

    def after_update(self, state: ModelState, has_batch: bool, ranks_with_batch: int) -> None:
        """Called after every update, by all ranks.

        Args:
            has_batch: whether this rank had a batch for it.
            ranks_with_batch: how many ranks had one; known from the plan.
        """
        ...

    def end_of_epoch(self, state: ModelState) -> None:
        """Make the model the same on all ranks."""
        ...

    def differing(self) -> tuple[StatePart, ...]:
        """What may differ between the ranks now, so that a checkpoint needs each rank's own."""
        ...

    def averaged(self, state: ModelState) -> AbstractContextManager[None]:
        """Collective. Inside the `with` block, the model is the average over the ranks; afterwards it is what it was before."""
        ...

    def state(self) -> dict[str, int]:
        """What this rank has to save to continue as if it had not been stopped."""
        ...

    def restore(self, state: dict[str, int]) -> None:
        """Continue from what `state` returned."""
        ...


class ReducerClass(Protocol):
    """The class of a reducer, as it stands in the table."""

    @property
    def keys(self) -> type:
        """The dataclass with the config keys that it reads; `ReduceKeys` inherits from it."""
        ...

    def from_keys(self, keys: Any, comm: Communicator, timer: Timer) -> Reducer:
        """A class method: make a reducer from its `keys`. The timer counts the seconds that it waits for other ranks."""
        ...


class UpdateCounts:
    """How many updates this rank and all ranks had batches for since the last sync. Known from the plan, without a message.

    Attributes:
        updates: the number of updates since the last sync.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.reset()

    def reset(self) -> None:
        self.updates = 0
        self._own = 0
        self._all = 0

    def add(self, has_batch: bool, ranks_with_batch: int) -> None:
        self.updates += 1
        self._own += int(has_batch)
        self._all += ranks_with_batch

    def state(self) -> dict[str, int]:
        return {"rounds": self.updates, "own": self._own, "all": self._all}  # the names that checkpoints have

    def restore(self, state: dict[str, int]) -> None:
        self.updates, self._own, self._all = state["rounds"], state["own"], state["all"]

    def weight(self) -> float:
        """This rank's weight in an average, by its share of the updates; exactly 1 if all ranks have the same share."""
        return self._own * self._size / self._all if self._all else 1.0


def average(comm: Communicator, tensors: Sequence[Tensor], counts: UpdateCounts, name: str) -> list[Tensor]:
    """Collective. The weighted average of each tensor over the ranks."""
    weight = counts.weight()
    return all_reduce(comm, [tensor * weight for tensor in tensors], "average", name=f"average.{name}")


def average_buffers(comm: Communicator, state: ModelState, counts: UpdateCounts) -> None:
    """Collective. Average floating-point buffers; take integer buffers from rank 0."""
    state.map_tensors("statistics", lambda tensors: average(comm, tensors, counts, "statistics"))
    state.map_tensors("counters", lambda tensors: comm.broadcast(tensors, name="counters"))


@contextmanager
def averaged(comm: Communicator, state: ModelState, counts: UpdateCounts, parts: Sequence[StatePart]) -> Iterator[None]:
    """Collective. Average what differs, and restore every rank's own afterwards. Counters are left: rank 0's are saved."""
    kinds: list[Kind] = [kind for kind in ("parameters", "statistics") if kind in parts]
    own: dict[Kind, list[Tensor]] = {}

    def replace(kind: Kind, tensors: list[Tensor]) -> list[Tensor]:
        own[kind] = [tensor * 1 for tensor in tensors]  # copies
        return average(comm, tensors, counts, f"saved.{kind}")

    for kind in kinds:
        state.map_tensors(kind, lambda tensors, kind=kind: replace(kind, tensors))  # type: ignore[misc]
    yield
    for kind in kinds:
        state.map_tensors(kind, lambda _, kind=kind: own[kind])  # type: ignore[misc]


def buckets(kinds: Sequence[tuple[int, object]], num_bytes: int) -> list[list[int]]:
    """The parameters' numbers in groups, each of which is sent in one message; last parameter first.

    A group is of one type and ends with the parameter that brings it to `num_bytes`: a small one (a bias) beside a large one (its
    layer's weight) costs no message of its own.

    Args:
        kinds: the bytes and the type of each parameter, in the model's order.
        num_bytes: large enough for the bandwidth of the transport, small enough to start early.

    >>> buckets([(900, "float32"), (8, "float32"), (1200, "float32"), (8, "float32"), (8, "float64")], 1000)
    [[4], [3, 2], [1, 0]]
    >>> buckets([(8, "float32"), (8, "float32")], 1000)
    [[1, 0]]
    """
    groups: list[list[int]] = []
    missing = 0
    for number in reversed(range(len(kinds))):
        size, kind = kinds[number]
        if missing <= 0 or kind != kinds[groups[-1][0]][1]:
            groups.append([])
            missing = num_bytes
        groups[-1].append(number)
        missing -= size
    return groups
