"""Losses and outputs of steps, independent of the framework: those that a config's functions mark, and a learner's `meter`.

The meter reports sums and counts of losses, and the cost of steps. Sums and counts are read from the device once they have
arrived, or when all of them are requested: no step waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple, Protocol

import numpy

from hvdtrain.comm.base import Tensor
from hvdtrain.context import Loss, Output
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, Problem
from hvdtrain.learner.precision import GradientCheck, Updates
from hvdtrain.runtime.scores import Scores

NO_LOSSES: Mapping[str, Loss] = {}

TINY = 1e-30
"""The smallest divisor of a sum: if no elements were counted, the sum is also zero."""


@dataclass(frozen=True)
class BatchOutputs:
    """What forward_step has marked of a batch.

    Attributes:
        values: by name, one row for each sequence, and the number of its frames without padding; None: all frames. Of a packed
            batch, those with numbers of frames are the frames of one sequence after the other.
        vectors: the names of outputs without a frame axis: features of the whole sequence, shape (features,).
        array_of: the array of a row.
    """

    values: Mapping[str, tuple[Any, Sequence[int] | None]]
    vectors: Collection[str] = ()
    array_of: Callable[[Any], Array] = numpy.asarray


@dataclass(frozen=True)
class NotFinite:
    """A training loss that is not finite.

    Attributes:
        step: the number of training steps done before this one.
        indices: the batch's sequences in the dataset.
        parameters: the names of the parameters that were not finite when the loss was read: on a CPU, before the update; on a
            GPU, up to a few updates later.
    """

    step: int
    loss: str
    value: float
    indices: tuple[int, ...]
    parameters: tuple[str, ...]


class NormalizedLosses(NamedTuple):
    """The losses of a train_step that are divided by their number of elements (use_normalized_loss).

    Attributes:
        is_only_loss: whether such a loss is the only one that is minimized. Its gradients can be divided after the reduction.
    """

    names: tuple[str, ...]
    is_only_loss: bool

    def __str__(self) -> str:
        names = ", ".join(self.names) or "none"
        return names if self.is_only_loss or not self.names else f"{names} beside other losses"


def normalized_losses(losses: Mapping[str, Loss], minimized_before: Collection[str] = ()) -> NormalizedLosses:
    """The losses to normalize.

    Args:
        minimized_before: they are normalized if they are marked with the scale 0.
    """
    wanted = {name: loss for name, loss in losses.items() if not loss.as_error and (loss.scale != 0 or name in minimized_before)}
    names = tuple(name for name, loss in wanted.items() if loss.use_normalized_loss)
    return NormalizedLosses(names, is_only_loss=len(wanted) == 1)


def minimized_losses(losses: Mapping[str, Loss]) -> dict[str, Loss]:
    """The losses to minimize: those that are not errors and have a nonzero scale."""
    return {name: loss for name, loss in losses.items() if not loss.as_error and loss.scale != 0}


def scales_of(losses: Mapping[str, Loss], train: bool) -> dict[str, float]:
    """The losses and errors of a step in order, each with the scale it is minimized with; 0: it is not minimized."""
    scaled = minimized_losses(losses) if train else {}
    return {name: float(scaled[name].scale) if name in scaled else 0.0 for name in losses}


def check_marked_losses(losses: Mapping[str, Loss], is_tensor: Callable[[Any], bool]) -> None:
    """Raises: ConfigError, if train_step marked nothing, or values that are not the framework's tensors."""
    if not losses:
        raise ConfigError.of("wrong-call", "train_step: expected a call of hvdtrain.get_run_ctx().mark_as_loss(...), got none")
    problems = [
        Problem.of(
            "wrong-result",
            f"train_step: expected a tensor with one number per element in mark_as_loss(..., {name!r}), got {loss.value!r:.60}, "
            f"a {type(loss.value).__name__} (no .item(), float() or numpy: hvdtrain adds up the elements of all ranks)",
        )
        for name, loss in losses.items()
        if not is_tensor(loss.value)
    ]
    if problems:
        raise ConfigError(problems)


def check_same_normalized(
    first: NormalizedLosses, current: NormalizedLosses, losses: Mapping[str, Loss] = NO_LOSSES, since: str = "epoch"
) -> None:
    """Raises: ConfigError, if a step's normalized losses differ from those of the first step.

    Args:
        since: the first step is that of the epoch, or of the training.
        losses: what the step marked. The scale of a loss may have become zero since the first step: its elements still count.
    """
    faded = {name for name, loss in losses.items() if not loss.as_error and loss.scale == 0}
    if (
        current == first
        or not (current.names or first.names)
        or (not first.is_only_loss and [name for name in first.names if name not in faded] == [*current.names])
    ):
        return
    late = sorted(set(current.names) - set(first.names))
    named = f": {', '.join(late)}" if late else ""
    hint = f" (a loss that begins later has a small scale, such as 1e-9, from the {since}'s first step on{named})"
    raise ConfigError.of(
        "wrong-result", f"train_step: expected losses with use_normalized_loss as in the first step: {first}; got {current}{hint}"
    )


def nothing_to_minimize() -> ConfigError:
    """The error when no marked loss depends on a parameter."""
    return ConfigError.of(
        "wrong-result",
        "train_step: expected a loss that depends on the model's parameters, got only errors or constants "
        "(or gradients are off: no_grad, set_grad_enabled, requires_grad)",
    )


def check_marked_outputs(outputs: Mapping[str, Output]) -> None:
    """Raises: ConfigError, if forward_step marked nothing."""
    if not outputs:
        raise ConfigError.of(
            "wrong-call", "forward_step: expected a call of hvdtrain.get_run_ctx().mark_as_output(...), got none"
        )


MAX_PENDING = 1000
"""The number of batches whose scores may be pending; at this number all are fetched, which waits for the device."""

MAX_NOT_FINITE = 3
"""The number of non-finite losses to record: later ones add nothing, as the model is broken by then."""


class Clock(Protocol):
    """Measures the seconds of spans on the device. `take` waits for it and returns the seconds since the last `take`; `known`
    does not wait and returns the seconds of all spans known to be finished."""

    def span(self) -> AbstractContextManager[None]: ...

    def take(self) -> float: ...

    def known_seconds(self) -> float: ...


@dataclass(frozen=True)
class Transfer:
    """How numbers are copied from the device.

    Attributes:
        read: returns one list of the numbers in several handles from `start`; waits for them.
        start: starts to copy a tensor and returns a handle; called once for each.
        has_arrived: whether `read` can read a handle without waiting. None: unknown.
        max_pending: the largest number of batches whose numbers may be under way; 1 on a CPU, where deferring gains nothing.
    """

    read: Callable[[list[Any]], list[float]]
    start: Callable[[Tensor], Any] = lambda numbers: numbers
    has_arrived: Callable[[Any], bool] | None = None
    max_pending: int = 1


class _Pending(NamedTuple):
    """A batch's sums and counts in transfer from the device, the losses' names and scales (0: not minimized), and whether those
    that are not finite are left out."""

    finite_only: bool
    names: Mapping[str, float]
    numbers: Any
    step: int
    indices: Array


class Meter:
    """The results and the cost of a learner's steps. On a GPU, reading a value waits for the device unless the value has already
    arrived; steps never wait.

    Args:
        transfer: fetches tensors of shape (2 * losses,), each with a batch's sums followed by the counts.
        parameters: returns the parameters' values by name.
        clock: measures the steps.
        check: counts updates, and has the loss scale; None: all are applied. If updates are skipped up to a limit, the sums of
            their batches that are not finite are left out.
        peak_memory: returns the peak use of the device's memory so far, in bytes; None on a CPU.
        gradient_norm: returns the global norm of the gradients before clipping, in the newest update whose norm has arrived from
            the device; in the last update if arrival is unknown. None without `gradient_clip_global_norm`.
        take_splits: returns the number of training batches since the last call that did not fit into memory and were split.
    """

    def __init__(
        self,
        transfer: Transfer,
        parameters: Callable[[], Iterable[tuple[str, Array]]],
        clock: Clock,
        check: GradientCheck | None = None,
        *,
        peak_memory: Callable[[], int | None] = lambda: None,
        gradient_norm: Callable[[], float | None] = lambda: None,
        take_splits: Callable[[], int] = lambda: 0,
    ) -> None:
        self.clock = clock
        self.peak_memory = peak_memory
        self.gradient_norm = gradient_norm
        self.take_splits = take_splits
        self._check = check
        self._transfer = transfer
        self._parameters = parameters
        self._finite_only = check is not None and check.has_limit
        self._pending: list[_Pending] = []
        self._not_finite: list[NotFinite] = []
        self._scores = Scores()

    @property
    def loss_scale(self) -> float | None:
        """The factor applied to losses before backward; None: they are not scaled."""
        scale = None if self._check is None else self._check.scale
        return None if scale is None else scale.scale

    def add(self, names: Mapping[str, float], numbers: Tensor, step: int, indices: Array, train: bool) -> None:
        """Add a batch's numbers.

        Args:
            names: the losses and errors in the order of the numbers, each with the scale it is minimized with, or 0.
            step: the number of training steps done before this one.
            indices: the batch's sequences in the dataset.
            train: whether it is a step of training.
        """
        batch = _Pending(train and self._finite_only, names, self._transfer.start(numbers), step, indices)
        if self._transfer.max_pending == 1:
            self._count(batch, self._transfer.read([batch.numbers]))
            return
        self._pending.append(batch)
        if len(self._pending) >= self._transfer.max_pending:
            self.fetch()
        elif self._transfer.has_arrived is not None:
            self._read(self._num_arrived(self._transfer.has_arrived))

    def take_scores(self) -> Scores:
        """The sums and counts of losses and errors of all batches since the last call of this or of `drain_ready`."""
        self.fetch()
        return self._take()

    def drain_ready(self) -> Scores:
        """The same for those batches whose numbers can be read without waiting for the device; all if arrival is unknown."""
        self._read(len(self._pending) if self._transfer.has_arrived is None else self._num_arrived(self._transfer.has_arrived))
        return self._take()

    def take_not_finite(self) -> list[NotFinite]:
        """The minimized losses that were not finite, among those read from the device since the last call.

        On a GPU, losses are read a few steps late: once they have arrived, or when scores are taken.
        """
        not_finite, self._not_finite = self._not_finite, []
        return not_finite

    def fetch(self) -> None:
        """Read all pending numbers, waiting for the device."""
        self._read(len(self._pending))

    def take_updates(self) -> Updates:
        """The updates since the last call that were checked for finite gradients: all, if the loss is scaled or
        `num_allowed_consec_invalid_gradient_steps` is set; else none."""
        return Updates() if self._check is None else self._check.take_updates()

    def take_step_seconds(self) -> float:
        """The seconds of `backward` and `update` since the last call, measured on the device."""
        return self.clock.take()

    def step_seconds(self) -> float:
        """The seconds of `backward` and `update` since the learner was created, over steps known to be finished; does not wait
        for the device."""
        return self.clock.known_seconds()

    def _take(self) -> Scores:
        scores, self._scores = self._scores, Scores()
        return scores

    def _num_arrived(self, has_arrived: Callable[[Any], bool]) -> int:
        """The number of pending batches that can be read without waiting: numbers arrive in order."""
        return next((number for number, batch in enumerate(self._pending) if not has_arrived(batch.numbers)), len(self._pending))

    def _read(self, num_batches: int) -> None:
        if not num_batches:
            return
        batches, self._pending = self._pending[:num_batches], self._pending[num_batches:]
        values = self._transfer.read([batch.numbers for batch in batches])
        done = 0
        for batch in batches:
            begin, done = done, done + 2 * len(batch.names)
            self._count(batch, values[begin:done])

    def _count(self, batch: _Pending, values: Sequence[float]) -> None:
        middle = len(batch.names)
        for number, (name, loss_scale) in enumerate(batch.names.items()):
            total = values[number]
            is_finite = isfinite(total)
            if is_finite or not batch.finite_only:
                self._scores.add(name, total, values[middle + number], loss_scale)
                if not is_finite and loss_scale and len(self._not_finite) < MAX_NOT_FINITE:
                    self._note(batch, name, total)

    def _note(self, batch: _Pending, name: str, total: float) -> None:
        broken = tuple(name for name, values in self._parameters() if not numpy.isfinite(values).all())
        self._not_finite.append(NotFinite(batch.step, name, total, tuple(batch.indices.tolist()), broken))
