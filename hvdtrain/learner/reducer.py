"""The contract of a reducer: how the ranks train one model. The table of reducers is in `reducers.py`.

A reducer has two halves. Its `GradientExchange` reduces gradients between backward and the optimizer; its `EpochSync` can change
the model's tensors after every update and at the end of an epoch. Neither depends on the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from hvdtrain.comm.base import Communicator, Op, Tensor, all_reduce
from hvdtrain.comm.groups import RankGroup
from hvdtrain.errors import BrokenSequence
from hvdtrain.learner.compression import GradientCompressor

if TYPE_CHECKING:
    from hvdtrain.learner.model_state import ModelState, Role, StatePart
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


class FinishedUpdate(NamedTuple):
    """An update that all ranks have finished.

    Attributes:
        has_batch: by rank, whether it had a batch for it, as planned.
        step: the number of training steps done.
        learning_rate: used by the optimizer.
        had_batch: whether this rank had one with any sequence, where `skip_broken` may empty one; None: `has_batch` is right.
    """

    has_batch: Sequence[bool]
    step: int = 0
    learning_rate: float = 0.0
    had_batch: bool | None = None


class GradientExchange:
    """Adds up, or averages, gradients over the ranks: `Gradients -> GradientExchange -> GradientCompressor -> Communicator`.

    While it is not active, every rank keeps its own gradients, and no call is collective.

    Args:
        comm: the ranks that exchange gradients.
        timer: measures the seconds that this rank waits for others.
        op: also used for the counts of loss elements: if both are averaged, the factors cancel.
        compressor: None: gradients are sent as they are.
        steps: the number of initial training steps in which gradients are exchanged; None: all steps.
        group: the ranks of the job that `comm` connects, if they are a part of it; None: all ranks of the job.

    Attributes:
        is_active: whether gradients are exchanged for the next update, so that ranks without a batch apply it as well.
        is_sent: whether gradients of the next update go to other ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        timer: Timer,
        op: Op = "sum",
        compressor: GradientCompressor | None = None,
        steps: int | None = None,
        group: Sequence[int] | None = None,
    ) -> None:
        self._comm = comm
        self._timer = timer
        self._group = group
        self.op: Op = op
        self.compressor = GradientCompressor(comm) if compressor is None else compressor
        self.steps = steps
        self.is_active = steps != 0

    @property
    def is_active(self) -> bool:
        return self._is_active

    @is_active.setter
    def is_active(self, value: bool) -> None:
        self._is_active = value
        self.is_sent = self._comm.size > 1 and value

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._comm.size

    @property
    def is_shared(self) -> bool:
        """Whether there are several ranks, and gradients are exchanged at least in some steps."""
        return self._comm.size > 1 and self.steps != 0

    @property
    def keeps_ranks_alike(self) -> bool:
        """Whether all ranks of the job have the same parameters after every update."""
        return self.steps is None and self._group is None

    @property
    def reaches_all(self) -> bool:
        """Whether all ranks of the job see the same gradients in the next update."""
        return self.is_active and self._group is None

    def begin_update(self, has_batch: Sequence[bool]) -> None:
        """Called by all ranks before the first step of an update. A group without any batch does not update.

        Args:
            has_batch: by rank of the job, whether it has a batch for the update; known from the plan.
        """
        if self._group is not None:
            self.is_active = any(has_batch[rank] for rank in self._group)

    def start(self, gradients: list[Tensor], *, name: str, owners: Sequence[int] | None = None) -> Any:
        """Start to reduce gradients, which may be overwritten. Returns a handle.

        Args:
            owners: for each gradient, the only rank that needs the result; None: all ranks need all results.
        """
        return self.compressor.start(gradients, self.op, name=name, owners=owners) if self.is_sent else gradients

    def finish(self, handle: Any) -> list[Tensor]:
        """Wait for the gradients that the optimizer applies."""
        if not self.is_sent:
            gradients: list[Tensor] = handle
            return gradients
        with self._timer.span("communication"):
            return self.compressor.finish(handle)

    def rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        """Gather the rows of a sparse gradient from all ranks, with the row numbers; a rank may have none."""
        if not self.is_active:
            return values, indices
        all_values, all_indices = self.compressor.gather_rows([values, indices], name=name)
        return (all_values / self._comm.size if self.op == "average" else all_values), all_indices

    def agree(self, value: T | None, former: T | None = None) -> T:
        """The first value that is not None, by rank; if all are None, the former one. Called a few times in a training."""
        values = (
            self._comm.gather(value, name="agree") if self.is_active else [value]
        )  # without an exchange, only a rank with a batch calls this
        agreed = next((known for known in (*values, former) if known is not None), None)
        if agreed is None:
            error = BrokenSequence(
                "train: expected sequences that can be read in the first step, got only broken ones on all ranks"
            )
            raise error.on_all_ranks() if self._group is None else error
        return agreed

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

    @property
    def alike(self) -> Sequence[int]:
        """The ranks, including this one, that have the same model and optimizer after every update."""
        ...

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


class Traffic(NamedTuple):
    """What a rank has exchanged.

    Attributes:
        syncs: the number of parameter syncs.
        sent: the bytes sent for them and as gradients.
        between_groups: the bytes of these that were sent to other groups of ranks; 0 without groups.
    """

    syncs: int = 0
    sent: int = 0
    between_groups: int = 0


@dataclass(frozen=True)
class Reducer:
    """How the ranks train together.

    Attributes:
        gradients: reduces gradients between backward and the optimizer.
        sync: changes the model after updates.
        description: what the ranks exchange and how often, for the log.
        has_groups: whether gradients are exchanged within groups of ranks, and `sync` is between the groups.
    """

    gradients: GradientExchange
    sync: EpochSync
    description: str
    has_groups: bool = False

    @property
    def traffic(self) -> Traffic:
        """The exchange so far."""
        sent = self.sync.sent + self.gradients.compressor.sent
        return Traffic(self.sync.num_syncs, sent, self.sync.sent if self.has_groups else 0)


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
        self.updates, self._own, self._all = state["rounds"], state["own"], state["all"]

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
