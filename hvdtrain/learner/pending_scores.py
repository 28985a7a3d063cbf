"""Sums and counts of batches on their way from the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

from hvdtrain.comm.base import Tensor
from hvdtrain.data.types import Array
from hvdtrain.learner.base import NotFinite
from hvdtrain.runtime.scores import Scores

MANY = 1000
"""Batches whose scores wait on the device before they are fetched, in one piece."""


@dataclass(frozen=True)
class _Waiting:
    """A batch's sums and counts, on the device: of the losses, by name with whether they are minimized."""

    names: Mapping[str, bool]
    numbers: Tensor
    step: int
    indices: Array


class WaitingScores:
    """Sums and counts of batches, left on the device until somebody asks.

    Args:
        fetch: one list of numbers from the device's tensors, each of shape (2 * losses,): the sums, then the counts.
        broken: the names of parameters that hold other than finite numbers.
        at_once: nothing is gained by waiting: fetch every batch's numbers when they come.
        finite_only: leave out sums that are no finite numbers, as the updates of such batches are left out.
    """

    def __init__(
        self,
        fetch: Callable[[list[Tensor]], list[float]],
        broken: Callable[[], tuple[str, ...]],
        *,
        at_once: bool,
        finite_only: bool,
    ) -> None:
        self._fetch = fetch
        self._broken = broken
        self._many = 1 if at_once else MANY
        self._finite_only = finite_only
        self._waiting: list[_Waiting] = []
        self._not_finite: list[NotFinite] = []
        self._scores = Scores()

    def add(self, names: Mapping[str, bool], numbers: Tensor, step: int, indices: Array) -> None:
        """A batch's numbers.

        Args:
            names: of the losses and errors in the numbers' order, with whether each is minimized in this step.
            step: updates done before it in the whole training.
            indices: the batch's sequences in the dataset.
        """
        self._waiting.append(_Waiting(names, numbers, step, indices))
        if len(self._waiting) >= self._many:
            self.fetch()

    def take(self) -> Scores:
        """Everything added since the last call."""
        self.fetch()
        taken, self._scores = self._scores, Scores()
        return taken

    def take_not_finite(self) -> list[NotFinite]:
        """The minimized losses that were no finite numbers, of those fetched since the last call."""
        taken, self._not_finite = self._not_finite, []
        return taken

    def fetch(self) -> None:
        """Bring what waits from the device; wait for the device, if it is not done."""
        if not self._waiting:
            return
        values = iter(self._fetch([entry.numbers for entry in self._waiting]))
        for entry in self._waiting:
            totals = [next(values) for _ in entry.names]
            for (name, is_minimized), total in zip(entry.names.items(), totals, strict=True):
                count = next(values)
                if self._finite_only and not isfinite(total):
                    continue
                self._scores.add(name, total, count)
                if is_minimized and not isfinite(total):
                    self._note(entry, name, total)
        self._waiting = []

    def _note(self, entry: _Waiting, name: str, total: float) -> None:
        """Remember a loss that is no finite number; of each only the first few, as all that follow are none either."""
        if len(self._not_finite) < 3:
            self._not_finite.append(NotFinite(entry.step, name, total, tuple(entry.indices.tolist()), self._broken()))
