"""What a reducer is, and what several of them need. The table of reducers stands in `reduce.py`.

A reducer decides what the ranks exchange so that they train one model. Gradients go through it on their way from backward to the
optimizer; after every update it may change the model's tensors. It sees gradients and the model's state, never the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hvdtrain.comm.base import Communicator, Op, Tensor, all_reduce

if TYPE_CHECKING:
    from hvdtrain.learner.base import Kind, ModelState, StatePart
    from hvdtrain.learner.wire import Sent, Wire
    from hvdtrain.runtime.timer import Timer

T = TypeVar("T")

Numbers = dict[str, Any]
"""Numbers by name, also in lists and dicts, as a checkpoint can hold them."""


@dataclass(frozen=True)
class EpochStart:
    """An epoch that begins or goes on.

    Attributes:
        step: steps done in the whole training.
        updates: the number of updates of the whole epoch, if all of them take as many steps as the next one.
        learning_rate: that of the next update.
        goes_on: part of the epoch was done before a stop.
    """

    epoch: int
    step: int
    updates: int
    learning_rate: float
    goes_on: bool


@dataclass(frozen=True)
class FinishedUpdate:
    """An update that all ranks have done.

    Attributes:
        has_batch: whether this rank had a batch for it.
        ranks_with_batch: how many ranks had one; known from the plan.
        step: steps done in the whole training.
        learning_rate: that the optimizer used.
    """

    has_batch: bool
    ranks_with_batch: int
    step: int = 0
    learning_rate: float = 0.0


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

    def waited(self, seconds: float, sent: Sent) -> None:
        """Record what happened inside of a graph, where the reducer cannot measure it.

        Args:
            seconds: for which a step waited for other ranks.
            sent: the bytes of what this rank sent.
        """
        ...

    def agree(self, value: T | None) -> T:
        """A value that is the same on all ranks that know it: the first that is not None, by rank. Called once in a training."""
        ...

    @property
    def updates_without_batch(self) -> bool:
        """Whether gradients are reduced for the next update, so that a rank without a batch applies it as well."""
        ...

    @property
    def meets_every_update(self) -> bool:
        """Whether ranks wait for each other in every update of the whole training."""
        ...

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        """Called before the first update of an epoch, or of what is left of it, by all ranks."""
        ...

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        """Called after every update, by all ranks."""
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

    def settle(self, state: ModelState) -> None:
        """Wait for what is under way, so that it can be saved. Training goes on as if it were still under way."""
        ...

    def state(self) -> Numbers:
        """What this rank has to save, beside tensors, to continue as if it had not been stopped."""
        ...

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        """Continue from what `state` returned.

        Args:
            same_ranks: whether that was this rank's; otherwise it is rank 0's of another number of ranks.
        """
        ...

    def take_traffic(self) -> tuple[int, int]:
        """The number of syncs of parameters, and of bytes sent in these and as gradients, since the last call."""
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


class Traffic:
    """Counts what is sent. `start` and `finish` are those of a wire.

    Attributes:
        syncs: of parameters.
        sent: bytes.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._taken = (0, 0)
        self.syncs = 0
        self.sent = 0

    def start(
        self, tensors: Sequence[Tensor], op: Op, *, name: str, owners: Sequence[int] | None = None, exact: bool = False
    ) -> Any:
        before = self._wire.sent
        handle = self._wire.start(tensors, op, name=name, owners=owners, exact=exact)
        self.sent += self._wire.sent - before
        return handle

    def finish(self, handle: Any) -> list[Tensor]:
        return self._wire.finish(handle)

    def take(self) -> tuple[int, int]:
        """The numbers of syncs and of bytes since the last call."""
        now = self.syncs, self.sent
        taken = now[0] - self._taken[0], now[1] - self._taken[1]
        self._taken = now
        return taken


def weighted(tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
    """What a rank sends for a weighted average: the tensors times its weight; for the weight 1 the tensors themselves."""
    return list(tensors) if weight == 1.0 else [tensor * weight for tensor in tensors]


def average(comm: Communicator, tensors: Sequence[Tensor], counts: UpdateCounts, name: str) -> list[Tensor]:
    """Collective. The weighted average of each tensor over the ranks. May overwrite the tensors, which saves a copy of them."""
    return all_reduce(comm, weighted(tensors, counts.weight()), "average", name=f"average.{name}")


def average_buffers(comm: Communicator, state: ModelState, counts: UpdateCounts) -> None:
    """Collective. Average floating-point buffers; take integer buffers from rank 0."""
    state.map_tensors("statistics", lambda tensors: average(comm, tensors, counts, "statistics"))
    state.map_tensors("counters", lambda tensors: comm.broadcast(tensors, name="counters"))


Average = Callable[[list[Tensor]], list[Tensor]]
"""Collective. Makes the average over the ranks of tensors, which it may overwrite."""


@contextmanager
def averaged(state: ModelState, averages: Mapping[Kind, Average]) -> Iterator[None]:
    """Collective. Average some kinds of tensors, and restore every rank's own afterwards."""
    own: dict[Kind, list[Tensor]] = {}

    def replace(kind: Kind, tensors: list[Tensor]) -> list[Tensor]:
        own[kind] = copies(tensors)
        return averages[kind](tensors)

    for kind in averages:
        state.map_tensors(kind, lambda tensors, kind=kind: replace(kind, tensors))  # type: ignore[misc]
    yield
    for kind in averages:
        state.map_tensors(kind, lambda _, kind=kind: own[kind])  # type: ignore[misc]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the same values, in any framework."""
    return [tensor * 1 for tensor in tensors]


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
