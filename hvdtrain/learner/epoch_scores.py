"""How the scores of a dataset follow from those of its batches: as means, and as a plug-in says (the table `scorings`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.comm.base import Communicator
from hvdtrain.context import Loss, RunContext, statistic_name
from hvdtrain.errors import ConfigError
from hvdtrain.runtime.scores import Scores

MOST = 1000
"""The most numbers of a statistic: each is summed separately."""


class Scoring:
    """The scores of a dataset: means of its losses and errors. A plug-in may add others."""

    def prepare(self, device: Any) -> Sequence[Any]:
        """Called once when there is a model. Returns what train_step updates besides losses: each a `Metric` (torch/assembly.py).

        Args:
            device: of PyTorch; None: another framework computes.

        Raises:
            ConfigError: a score cannot be computed.
        """
        return ()

    def compute(self, comm: Communicator, scores: Scores, dataset: str) -> dict[str, float]:
        """Collective. The scores by name. Raises: ConfigError, on all ranks."""
        return scores.means()


SCORING = Scoring()


def with_statistics(context: RunContext, as_tensor: Callable[[Any], Any]) -> dict[str, Loss]:
    """The losses that a step marked, and the sums of its statistics as errors of one number each.

    Args:
        as_tensor: makes a tensor, float64, of numbers, an array or a tensor.

    Raises:
        ConfigError: a statistic does not have one row of numbers for each sequence.
    """
    losses = dict(context.losses)
    for name, values in context.statistics.items():
        rows = as_tensor(values)
        width = 1 if len(rows.shape) == 1 else rows.shape[-1]
        if len(rows.shape) not in (1, 2) or width is None or not 0 < width <= MOST:
            raise ConfigError.of(
                "wrong-result",
                f"mark_as_statistics: expected shape (sequences,) or (sequences, N) with N up to {MOST} in {name!r}, got "
                f"{tuple(rows.shape)}",
            )
        for number in range(width):
            column = rows if len(rows.shape) == 1 else rows[:, number]
            losses[statistic_name(name, number)] = Loss(column, 0.0, True, False, None)
    return losses
