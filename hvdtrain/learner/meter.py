"""What a learner's steps cost and what came out of them: a learner's `meter`, whatever the framework.

Sums and counts of losses stay on the device until somebody asks for them, so that no step waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from hvdtrain.comm.base import Tensor
from hvdtrain.data.types import Array
from hvdtrain.learner.base import NotFinite
from hvdtrain.learner.precision import LossScale
from hvdtrain.runtime.scores import Scores

MAX_PENDING = 1000
"""Batches whose scores may stay on a GPU; those of more are fetched at once, in one transfer."""

MAX_NOT_FINITE = 3
"""Losses that are not finite are remembered up to this number, as those that follow are not finite either."""


class Clock(Protocol):
    """Measures the seconds of spans on the device."""

    def span(self) -> AbstractContextManager[None]: ...

    def take(self) -> float: ...


class LearnerMeter:
    """Does what `Meter` in `base.py` says.

    Args:
        scores: sums and counts of the batches.
        clock: measures the steps.
        scale: of the loss; None: it is not scaled.
        peak_memory: gives the largest number of bytes of the device's memory in use so far; None on a CPU.
    """

    def __init__(
        self, scores: PendingScores, clock: Clock, scale: LossScale | None, peak_memory: Callable[[], int | None]
    ) -> None:
        self.scores = scores
        self.clock = clock
        self._scale = scale
        self._peak_memory = peak_memory

    @property
    def loss_scale(self) -> float | None:
        return None if self._scale is None else self._scale.scale

    def take_scores(self) -> Scores:
        return self.scores.take()

    def take_not_finite(self) -> list[NotFinite]:
        return self.scores.take_not_finite()

    def take_step_seconds(self) -> float:
        return self.clock.take()

    def peak_memory(self) -> int | None:
        return self._peak_memory()


@dataclass(frozen=True)
class _Pending:
    """A batch's sums and counts on the device, and the names of the losses, with whether each is minimized."""

    names: Mapping[str, bool]
    numbers: Tensor
    step: int
    indices: Array


class PendingScores:
    """Sums and counts of batches, left on the device until they are asked for.

    Args:
        fetch: makes one list of numbers from tensors of shape (2 * losses,), each with the sums, then the counts.
        not_finite: gives the names of the parameters that are not finite.
        on_cpu: every batch's numbers are fetched at once, as waiting gains nothing.
        finite_only: leave out sums that are not finite, as the updates of such batches are skipped.
    """

    def __init__(
        self,
        fetch: Callable[[list[Tensor]], list[float]],
        not_finite: Callable[[], tuple[str, ...]],
        *,
        on_cpu: bool,
        finite_only: bool,
    ) -> None:
        self._fetch = fetch
        self._find_not_finite = not_finite
        self._max_pending = 1 if on_cpu else MAX_PENDING
        self._finite_only = finite_only
        self._pending: list[_Pending] = []
        self._not_finite: list[NotFinite] = []
        self._scores = Scores()

    def add(self, names: Mapping[str, bool], numbers: Tensor, step: int, indices: Array) -> None:
        """Add a batch's numbers.

        Args:
            names: of the losses and errors in the numbers' order, with whether each is minimized in this step.
            step: steps done before this one in the whole training.
            indices: the batch's sequences in the dataset.
        """
        self._pending.append(_Pending(names, numbers, step, indices))
        if len(self._pending) >= self._max_pending:
            self.fetch()

    def take(self) -> Scores:
        """The scores of all batches since the last call."""
        self.fetch()
        taken, self._scores = self._scores, Scores()
        return taken

    def take_not_finite(self) -> list[NotFinite]:
        """The minimized losses that were not finite, of those fetched since the last call."""
        taken, self._not_finite = self._not_finite, []
        return taken

    def fetch(self) -> None:
        """Read all pending numbers from the device; this waits for it."""
        if not self._pending:
            return
        values = iter(self._fetch([batch.numbers for batch in self._pending]))
        for batch in self._pending:
            totals = [next(values) for _ in batch.names]
            for (name, is_minimized), total in zip(batch.names.items(), totals, strict=True):
                count = next(values)
                if self._finite_only and not isfinite(total):
                    continue
                self._scores.add(name, total, count)
                if is_minimized and not isfinite(total) and len(self._not_finite) < MAX_NOT_FINITE:
                    found = NotFinite(batch.step, name, total, tuple(batch.indices.tolist()), self._find_not_finite())
                    self._not_finite.append(found)
        self._pending = []
