"""The losses and outputs of steps, whatever the framework: what a config's functions marked, and a learner's `meter`.

The meter reports sums and counts of losses, and what the steps cost. Sums and counts are read from the device when they have
arrived, or when somebody asks for all of them: no step waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

from hvdtrain.comm.base import Tensor
from hvdtrain.context import Loss, Output
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, Problem
from hvdtrain.learner.base import NotFinite, Outputs
from hvdtrain.learner.precision import LossScale
from hvdtrain.runtime.scores import Scores

TINY = 1e-30
"""The smallest divisor of a sum: if no element was counted, the sum is zero, too."""


@dataclass(frozen=True)
class Normalized:
    """The losses of a train_step that are divided by their number of elements (use_normalized_loss).

    Attributes:
        alone: whether such a loss is the only one that is minimized. Its gradients can be divided after the reduction.
    """

    names: tuple[str, ...]
    alone: bool


def normalized_losses(losses: Mapping[str, Loss]) -> Normalized:
    """The losses that are to be normalized."""
    wanted = minimized_losses(losses)
    names = tuple(name for name, loss in wanted.items() if loss.use_normalized_loss)
    return Normalized(names, alone=len(wanted) == 1)


def minimized_losses(losses: Mapping[str, Loss]) -> dict[str, Loss]:
    """The losses that are minimized: those that are no errors and have a scale."""
    return {name: loss for name, loss in losses.items() if not loss.as_error and loss.scale != 0}


def scales_of(losses: Mapping[str, Loss], train: bool) -> dict[str, float]:
    """The losses and errors of a step in their order, each with the scale with which it is minimized; 0: it is not."""
    scaled = minimized_losses(losses) if train else {}
    return {name: float(scaled[name].scale) if name in scaled else 0.0 for name in losses}


def check_marked(losses: Mapping[str, Loss], is_tensor: Callable[[Any], bool]) -> None:
    """Raises: ConfigError, if train_step marked nothing, or something else than the framework's tensors."""
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


def check_same(first: Normalized, own: Normalized) -> None:
    """Raises: ConfigError, if a step has other normalized losses than the first step."""
    if own != first:
        raise ConfigError.of(
            "wrong-result", f"train_step: expected losses with use_normalized_loss as in the first step, {first}, got {own}"
        )


def nothing_to_minimize() -> ConfigError:
    """The error if no marked loss depends on a parameter."""
    return ConfigError.of(
        "wrong-result", "train_step: expected a loss that depends on the model's parameters, got only errors or constants"
    )


def check_outputs(outputs: Mapping[str, Output]) -> None:
    """Raises: ConfigError, if forward_step marked nothing."""
    if not outputs:
        raise ConfigError.of(
            "wrong-call", "forward_step: expected a call of hvdtrain.get_run_ctx().mark_as_output(...), got none"
        )


def by_sequence(
    outputs: Mapping[str, tuple[Sequence[Array], Sequence[int] | None]], count: int, vectors: frozenset[str] = frozenset()
) -> list[Outputs]:
    """The outputs of each sequence of a batch by name, without padding.

    Args:
        outputs: by name, one row for each sequence, and the number of the row's frames that belong to it; None: all of them.
        count: the number of sequences in the batch.
        vectors: as of `Outputs`.

    Raises:
        ConfigError: an output has another number of rows.
    """
    sequences = [Outputs(vectors) for _ in range(count)]
    for name, (rows, seq_lens) in outputs.items():
        lengths: Sequence[int | None] = [None] * len(rows) if seq_lens is None else seq_lens
        if not len(rows) == len(lengths) == count:
            raise ConfigError.of(
                "wrong-result", f"forward_step: expected an entry of {name} for each of {count} sequences, got {len(rows)}"
            )
        for sequence, row, length in zip(sequences, rows, lengths, strict=True):
            sequence[name] = row[:length] if row.ndim else row
    return sequences


MAX_PENDING = 1000
"""Batches whose scores may be pending; those of more are fetched at once, which waits for the device."""

MAX_NOT_FINITE = 3
"""Losses that are not finite are remembered up to this number, as those that follow are not finite either."""


class Clock(Protocol):
    """Measures the seconds of spans on the device. `take` waits for it and gives those since the last `take`; `known` does not
    wait and gives those of all spans that are known to be over."""

    def span(self) -> AbstractContextManager[None]: ...

    def take(self) -> float: ...

    def known(self) -> float: ...


class LearnerMeter:
    """Does what `Meter` in `base.py` says.

    Args:
        scores: sums and counts of the batches.
        clock: measures the steps.
        scale: of the loss; None: it is not scaled.
        peak_memory: gives the largest number of bytes of the device's memory in use so far; None on a CPU.
        gradient_norm: gives the global norm of an update's gradients, as `Meter` says.
    """

    def __init__(
        self,
        scores: PendingScores,
        clock: Clock,
        scale: LossScale | None,
        peak_memory: Callable[[], int | None],
        gradient_norm: Callable[[], float | None],
    ) -> None:
        self.scores = scores
        self.clock = clock
        self.gradient_norm = gradient_norm
        self._scale = scale
        self._peak_memory = peak_memory

    @property
    def loss_scale(self) -> float | None:
        return None if self._scale is None else self._scale.scale

    def take_scores(self) -> Scores:
        return self.scores.take()

    def drain_ready(self) -> Scores:
        return self.scores.drain_ready()

    def take_not_finite(self) -> list[NotFinite]:
        return self.scores.take_not_finite()

    def take_step_seconds(self) -> float:
        return self.clock.take()

    def step_seconds(self) -> float:
        return self.clock.known()

    def peak_memory(self) -> int | None:
        return self._peak_memory()


@dataclass(frozen=True)
class Transfer:
    """How numbers come from the device.

    Attributes:
        read: makes one list of numbers of what `start` returned for several tensors; waits for them.
        start: starts to copy a tensor; called once for each.
        has_arrived: whether `read` would not wait for what `start` returned. None: nobody knows.
    """

    read: Callable[[list[Any]], list[float]]
    start: Callable[[Tensor], Any] = lambda numbers: numbers
    has_arrived: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class _Pending:
    """A batch's sums and counts on their way from the device, and the names of the losses, with the scale of those minimized."""

    names: Mapping[str, float]
    numbers: Any
    step: int
    indices: Array


class PendingScores:
    """Sums and counts of batches, which may be on the device for a while.

    Args:
        transfer: brings tensors of shape (2 * losses,), each with the sums, then the counts.
        not_finite: gives the names of the parameters that are not finite.
        on_cpu: every batch's numbers are fetched at once, as waiting gains nothing.
        finite_only: leave out sums that are not finite, as the updates of such batches are skipped.
    """

    def __init__(
        self,
        transfer: Transfer,
        not_finite: Callable[[], tuple[str, ...]],
        *,
        on_cpu: bool,
        finite_only: bool,
    ) -> None:
        self._transfer = transfer
        self._find_not_finite = not_finite
        self._max_pending = 1 if on_cpu else MAX_PENDING
        self._finite_only = finite_only
        self._pending: list[_Pending] = []
        self._not_finite: list[NotFinite] = []
        self._scores = Scores()

    def add(self, names: Mapping[str, float], numbers: Tensor, step: int, indices: Array) -> None:
        """Add a batch's numbers.

        Args:
            names: of the losses and errors in the numbers' order, each with the scale with which this step minimizes it, or 0.
            step: steps done before this one in the whole training.
            indices: the batch's sequences in the dataset.
        """
        self._pending.append(_Pending(names, self._transfer.start(numbers), step, indices))
        if len(self._pending) >= self._max_pending:
            self.fetch()
        elif self._transfer.has_arrived is not None:
            self._read(self._num_arrived(self._transfer.has_arrived))

    def take(self) -> Scores:
        """The scores of all batches since the last call of this or of `drain_ready`; waits for the device."""
        self.fetch()
        return self._taken()

    def drain_ready(self) -> Scores:
        """The same of those batches whose numbers have arrived; of all, if nobody knows which have."""
        self._read(len(self._pending) if self._transfer.has_arrived is None else self._num_arrived(self._transfer.has_arrived))
        return self._taken()

    def take_not_finite(self) -> list[NotFinite]:
        """The minimized losses that were not finite, of those fetched since the last call."""
        taken, self._not_finite = self._not_finite, []
        return taken

    def fetch(self) -> None:
        """Read all pending numbers from the device; this waits for it."""
        self._read(len(self._pending))

    def _taken(self) -> Scores:
        taken, self._scores = self._scores, Scores()
        return taken

    def _num_arrived(self, has_arrived: Callable[[Any], bool]) -> int:
        """How many of the first pending batches can be read without waiting: numbers arrive in order."""
        return next((place for place, batch in enumerate(self._pending) if not has_arrived(batch.numbers)), len(self._pending))

    def _read(self, num_batches: int) -> None:
        """Read the numbers of the first pending batches."""
        if not num_batches:
            return
        batches, self._pending = self._pending[:num_batches], self._pending[num_batches:]
        values = iter(self._transfer.read([batch.numbers for batch in batches]))
        for batch in batches:
            totals = [next(values) for _ in batch.names]
            for (name, loss_scale), total in zip(batch.names.items(), totals, strict=True):
                count = next(values)
                if self._finite_only and not isfinite(total):
                    continue
                self._scores.add(name, total, count, loss_scale)
                if loss_scale and not isfinite(total) and len(self._not_finite) < MAX_NOT_FINITE:
                    found = NotFinite(batch.step, name, total, tuple(batch.indices.tolist()), self._find_not_finite())
                    self._not_finite.append(found)
