"""What the losses of a step are for: found once for all steps that mark the same ones in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hvdtrain.context import Loss
from hvdtrain.learner.meter import NormalizedLosses, minimized_losses, normalized_losses, scales_of


class Marks(NamedTuple):
    """How the losses and errors of a training step are marked.

    Attributes:
        scales: of all in order, with which they are minimized; 0: they are not.
        minimized: the names of those that are.
        normalized: the ones that are divided by their number of elements.
    """

    scales: Mapping[str, float]
    minimized: tuple[str, ...]
    normalized: NormalizedLosses


class MarksOfSteps:
    """The marks of one step after the other: mostly the same object as in the step before."""

    def __init__(self) -> None:
        self._loss_marks: list[tuple[str, float, bool, bool]] | None = None
        self._marks: Marks | None = None

    def marks_of(self, losses: Mapping[str, Loss]) -> Marks:
        loss_marks = [(name, float(loss.scale), loss.as_error, loss.use_normalized_loss) for name, loss in losses.items()]
        if self._marks is None or loss_marks != self._loss_marks:
            self._loss_marks = loss_marks
            self._marks = Marks(scales_of(losses, train=True), tuple(minimized_losses(losses)), normalized_losses(losses))
        return self._marks
