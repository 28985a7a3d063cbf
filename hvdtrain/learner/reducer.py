"""The contract of a reducer: how the ranks train one model. The table of reducers is in `reducers.py`.

A reducer has two halves. Its `GradientExchange` reduces gradients between backward and the optimizer; its `EpochSync` can change
the model's tensors after every update and at the end of an epoch. Neither depends on the learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from hvdtrain.comm.base import Communicator, Op, Tensor
from hvdtrain.errors import BrokenSequence
from hvdtrain.learner.compression import GradientCompressor

if TYPE_CHECKING:
    from hvdtrain.learner.model_state import ModelState, StatePart
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
        has_batch: by rank, whether the plan has a batch for it.
        step: the number of training steps done.
        learning_rate: used by the optimizer.
        had_batch: whether this rank really had one, as `skip_broken` may leave out all sequences of a batch; None: as planned.
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
        """Whether there are several ranks that exchange gradients in at least some steps."""
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
        # Without an exchange, only a rank with a batch calls this.
        values = self._comm.gather(value, name="agree") if self.is_active else [value]
        agreed = next((order for order in (*values, former) if order is not None), None)
        if agreed is None:
            error = BrokenSequence(
                "train: expected sequences that can be read in the first step, got only broken ones on all ranks"
            )
            raise error.on_all_ranks() if self._group is None else error
        return agreed

    def count_graph(self, seconds: float, float32: int, other_bytes: int) -> None:
        """Count the waiting seconds and sent bytes that a graph (of TensorFlow) reports: they cannot be measured from outside."""
        if self.is_active:
            self._timer.book("communication", seconds)
            self.compressor.count_graph_bytes(float32, other_bytes)


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
