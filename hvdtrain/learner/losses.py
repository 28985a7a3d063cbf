"""What a config's losses mean, whatever the framework: which are means, which are minimized, and their sums on the way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdtrain.comm.base import Tensor
from hvdtrain.context import Loss
from hvdtrain.errors import ConfigError
from hvdtrain.scores import Scores

TINY = 1e-30
"""What a sum is divided by where no element was counted: it is zero, too."""

MANY = 1000
"""Batches whose scores wait on the device before they are fetched, in one piece."""


@dataclass(frozen=True)
class Normalized:
    """The losses of a train_step that are to be means, and whether such a loss is all that is minimized."""

    names: tuple[str, ...]
    alone: bool


def normalized(losses: Mapping[str, Loss]) -> Normalized:
    """Which losses are to be means."""
    wanted = minimized(losses)
    names = tuple(name for name, loss in wanted.items() if loss.use_normalized_loss)
    return Normalized(names, alone=len(wanted) == 1)


def minimized(losses: Mapping[str, Loss]) -> dict[str, Loss]:
    """The losses that gradients come from."""
    return {name: loss for name, loss in losses.items() if not loss.as_error and loss.scale != 0}


def check_marked(losses: Mapping[str, Loss]) -> None:
    """Raises: ConfigError, if train_step marked nothing."""
    if not losses:
        raise ConfigError(["train_step: expected a call of hvdtrain.get_run_ctx().mark_as_loss(...), got none"])


def check_same(first: Normalized, own: Normalized) -> None:
    """Raises: ConfigError, if a step has other losses than the first one had."""
    if own != first:
        raise ConfigError([f"train_step: expected losses with use_normalized_loss as in the first step, {first}, got {own}"])


def nothing_to_minimize() -> ConfigError:
    """The error where no marked loss depends on a parameter."""
    return ConfigError(["train_step: expected a loss that depends on the model's parameters, got only errors or constants"])


class WaitingScores:
    """Sums and counts of batches, left on the device until somebody asks.

    Args:
        fetch: one list of numbers from the device's tensors, each of shape (2 * losses,): the sums, then the counts.
    """

    def __init__(self, fetch: Callable[[list[Tensor]], list[float]]) -> None:
        self._fetch = fetch
        self._waiting: list[tuple[tuple[str, ...], Tensor]] = []
        self._scores = Scores()

    def add(self, names: tuple[str, ...], numbers: Tensor) -> None:
        """A batch's numbers, those of `names`."""
        self._waiting.append((names, numbers))
        if len(self._waiting) >= MANY:
            self.fetch()

    def take(self) -> Scores:
        """Everything added since the last call."""
        self.fetch()
        taken, self._scores = self._scores, Scores()
        return taken

    def fetch(self) -> None:
        """Bring what waits from the device; wait for the device, if it is not done."""
        if not self._waiting:
            return
        values = iter(self._fetch([numbers for _, numbers in self._waiting]))
        for names, _ in self._waiting:
            totals = [next(values) for _ in names]
            for name, total in zip(names, totals, strict=True):
                self._scores.add(name, total, next(values))
        self._waiting = []
