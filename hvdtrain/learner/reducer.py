"""The contract of a reducer: how the ranks train one model. The table of reducers is in `reducers.py`.

A reducer has two halves. Its `GradientExchange` reduces gradients between backward and the optimizer; its `EpochSync` can change
the model's tensors after every update and at the end of an epoch. Neither depends on the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hvdtrain.comm.base import Communicator, Op, Tensor, all_reduce
from hvdtrain.errors import BrokenSequence
from hvdtrain.learner.compression import GradientCompressor

if TYPE_CHECKING:
    from hvdtrain.learner.model_state import Kind, ModelState, StatePart
    from hvdtrain.runtime.timer import Timer

T = TypeVar("T")

Numbers = dict[str, Any]
"""Numbers by name, possibly nested in lists and dicts, for a checkpoint."""


@dataclass(frozen=True)
class EpochStart:
    """The start of an epoch, or its continuation after a stop.

    Attributes:
        step: the number of training steps done.
        updates: the number of updates in the whole epoch, assuming that all take as many steps as the next one.
        learning_rate: of the next update.
        is_resumed: whether part of the epoch was done before a stop.
    """

    epoch: int
    step: int
    updates: int
    learning_rate: float
    is_resumed: bool


@dataclass(frozen=True)
class FinishedUpdate:
    """An update that all ranks have finished.

    Attributes:
        has_batch: whether this rank had a batch for it.
        ranks_with_batch: how many ranks had one; known from the plan.
        step: the number of training steps done.
        learning_rate: used by the optimizer.
    """

    has_batch: bool
    ranks_with_batch: int
    step: int = 0
    learning_rate: float = 0.0


class GradientExchange:
    """Adds up, or averages, gradients over the ranks: `Gradients -> GradientExchange -> GradientCompressor -> Communicator`.

    While it is not active, every rank keeps its own gradients, and no call is collective.

    Args:
        timer: measures the seconds that this rank waits for others.
        op: also used for the counts of loss elements: if both are averaged, the factors cancel.
        compressor: None: gradients are sent as they are.
        steps: the number of initial training steps in which gradients are exchanged; None: all steps.

    Attributes:
        is_active: whether gradients are exchanged for the next update, so that ranks without a batch apply it as well.
    """

    def __init__(
        self,
        comm: Communicator,
        timer: Timer,
        op: Op = "sum",
        compressor: GradientCompressor | None = None,
        steps: int | None = None,
    ) -> None:
        self._comm = comm
        self._timer = timer
        self.op: Op = op
        self.compressor = GradientCompressor(comm) if compressor is None else compressor
        self.steps = steps
        self.is_active = steps != 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._comm.size

    @property
    def is_shared(self) -> bool:
        """Whether there are several ranks, and gradients are exchanged at least in some steps."""
        return self._comm.size > 1 and self.steps != 0

    def start(self, gradients: list[Tensor], *, name: str, owners: Sequence[int] | None = None) -> Any:
        """Start to reduce gradients, which may be overwritten. Returns a handle.

        Args:
            owners: for each gradient, the only rank that needs the result; None: all ranks need all results.
        """
        return self.compressor.start(gradients, self.op, name=name, owners=owners) if self.is_active else gradients

    def finish(self, handle: Any) -> list[Tensor]:
        """Wait for the gradients that the optimizer applies."""
        if not self.is_active:
            own: list[Tensor] = handle
            return own
        with self._timer.span("communication"):
            return self.compressor.finish(handle)

    def rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        """Gather the rows of a sparse gradient from all ranks, with the row numbers; a rank may have none."""
        if not self.is_active:
            return values, indices
        all_values, all_indices = self.compressor.gather_rows([values, indices], name=name)
        return (all_values / self._comm.size if self.op == "average" else all_values), all_indices

    def agree(self, value: T | None) -> T:
        """Share a value that only some ranks know, but all of them alike. Called once in a training."""
        values = (
            self._comm.gather(value, name="agree") if self.is_active else [value]
        )  # without an exchange, only a rank with a batch calls this
        found = next((known for known in values if known is not None), None)
        if found is None:
            raise BrokenSequence(
                "train: expected sequences that can be read in the first step, got only broken ones on all ranks"
            ).on_all_ranks()
        return found

    def count_graph(self, seconds: float, float32: int, others: int) -> None:
        """Count the waiting seconds and sent bytes that a graph reports, as they cannot be measured from outside."""
        if self.is_active:
            self._timer.book("communication", seconds)
            self.compressor.count_graph_bytes(float32, others)


class EpochSync(Protocol):
    """Keeps the ranks' models in sync, after updates and at the end of an epoch.

    Attributes:
        num_syncs: the number of parameter syncs so far.
        sent: the bytes that this rank has sent for them.
    """

    @property
    def num_syncs(self) -> int: ...

    @property
    def sent(self) -> int: ...

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        """Called by all ranks before the first update of an epoch, or of its continuation."""
        ...

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        """Called by all ranks after every update."""
        ...

    def end_of_epoch(self, state: ModelState) -> None:
        """Make the model the same on all ranks."""
        ...

    def rank_local_state(self) -> tuple[StatePart, ...]:
        """The parts of the state that can differ between ranks now, so that a checkpoint needs those of each rank."""
        ...

    def averaged_model(self, state: ModelState) -> AbstractContextManager[None]:
        """Collective. Inside the `with` block, the model is the average over the ranks; it is restored afterwards."""
        ...

    def flush(self, state: ModelState) -> None:
        """Wait for messages under way, so that they can be saved. Training continues as if they were still under way."""
        ...

    def state(self) -> Numbers:
        """The numbers that this rank saves, so that it can continue as if it had not been stopped."""
        ...

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        """Continue from what `state` returned.

        Args:
            same_ranks: whether `state` is this rank's; otherwise it is from rank 0 of a different number of ranks.
        """
        ...


@dataclass(frozen=True)
class Reducer:
    """How the ranks train together.

    Attributes:
        gradients: reduces gradients between backward and the optimizer.
        sync: changes the model after updates.
        description: what the ranks exchange and how often, for the log.
    """

    gradients: GradientExchange
    sync: EpochSync
    description: str

    @property
    def traffic(self) -> tuple[int, int]:
        """The number of parameter syncs so far, and the bytes sent for them and as gradients."""
        return self.sync.num_syncs, self.sync.sent + self.gradients.compressor.sent


class ReducerClass(Protocol):
    """A class of `EpochSync`, as in the table."""

    @property
    def keys(self) -> type:
        """The section with the config keys that it reads; `ReduceKeys` inherits from it, so its `problems` call super's."""
        ...

    def from_keys(self, keys: Any, comm: Communicator, timer: Timer) -> Reducer:
        """A class method: make both halves from its `keys`. The timer measures the seconds that a rank waits for others."""
        ...


class UpdateCounts:
    """Counts updates since the last sync for which this rank, and all ranks, had batches. Known from the plan, without a message.

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
        return {"rounds": self.updates, "own": self._own, "all": self._all}  # the names in checkpoints

    def restore(self, state: dict[str, int]) -> None:
        self.updates, self._own, self._all = state["rounds"], state["own"], state["all"]

    def weight(self) -> float:
        """This rank's weight in an average: its share of the updates, and exactly 1 if all ranks have the same share."""
        return self._own * self._size / self._all if self._all else 1.0


def apply_weight(tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
    """The tensors times a rank's weight, for a weighted average; the same tensors if the weight is 1."""
    return list(tensors) if weight == 1.0 else [tensor * weight for tensor in tensors]


def average(comm: Communicator, tensors: Sequence[Tensor], counts: UpdateCounts, name: str) -> list[Tensor]:
    """Collective. The weighted average of each tensor over the ranks. Can overwrite the tensors, which saves a copy."""
    return all_reduce(comm, apply_weight(tensors, counts.weight()), "average", name=f"average.{name}")


def average_buffers(comm: Communicator, state: ModelState, counts: UpdateCounts) -> None:
    """Collective. Average floating-point buffers; take integer buffers from rank 0."""
    state.map_tensors("statistics", lambda tensors: average(comm, tensors, counts, "statistics"))
    state.map_tensors("counters", lambda tensors: comm.broadcast(tensors, name="counters"))


Average = Callable[[list[Tensor]], list[Tensor]]
"""Collective. Averages tensors over the ranks; can overwrite them."""


@contextmanager
def temporarily_average(state: ModelState, averages: Mapping[Kind, Average]) -> Iterator[None]:
    """Collective. Inside the `with` block, some kinds of tensors are averages; each rank's own are restored afterwards."""
    own: dict[Kind, list[Tensor]] = {}

    def replace(kind: Kind, tensors: list[Tensor]) -> list[Tensor]:
        own[kind] = copy_tensors(tensors)
        return averages[kind](tensors)

    for kind in averages:
        state.map_tensors(kind, lambda tensors, kind=kind: replace(kind, tensors))  # type: ignore[misc]
    try:
        yield
    finally:
        for kind in averages:
            state.map_tensors(kind, lambda _, kind=kind: own[kind])  # type: ignore[misc]


def copy_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, in any framework."""
    return [tensor * 1 for tensor in tensors]


def buckets(kinds: Sequence[tuple[int, object]], num_bytes: int) -> list[list[int]]:
    """The parameters' numbers in groups, each to be sent in one message; last parameter first.

    A group has one type and ends with the parameter that brings it to `num_bytes`, so that a small parameter (a bias) shares a
    message with a large one (its layer's weight).

    Args:
        kinds: the size in bytes and the type of each parameter, in the model's order.
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
