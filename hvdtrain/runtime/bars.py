"""How far something is that takes long, for somebody who waits: what a plug-in draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from hvdtrain.config.plugins import Registry
from hvdtrain.runtime.process import Process

EVERY = 0.2
"""Seconds between two drawings."""


class StepsSoFar(NamedTuple):
    """How far an epoch's training or an evaluation is.

    Attributes:
        name: of the epoch or the evaluation, in short.
        before: the number of steps that were done before it was resumed.
        number: the number of steps that are done.
        total: the number of all steps.
        share: the share that is done, from 0 to 1; steps are not equally large.
        seconds: since it began or was resumed.
    """

    name: str
    before: int
    number: int
    total: int
    share: float
    seconds: float


class StepBar(Protocol):
    """Shows how far an epoch's training or an evaluation is."""

    def draw(self, steps: StepsSoFar, parts: Sequence[str]) -> None:
        """Draw it, with as many of the other parts, such as losses, as there is room for."""

    def end(self, number: int, share: float) -> None:
        """It ended with so many steps, and this share of all; nothing, if it was not drawn."""


class Bars:
    """What is drawn; this one draws nothing."""

    @contextmanager
    def count(self, name: str, total: int | None, unit: str) -> Iterator[Callable[[int], object]]:
        """Inside the `with` block, show a count; yields a function to call with the number of new ones.

        Args:
            total: None: unknown.
            unit: the name of what is counted.
        """
        yield lambda number: None

    @contextmanager
    def line(self, text: str) -> Iterator[None]:
        """Show a line inside the `with` block."""
        yield

    @contextmanager
    def steps(self, process: Process) -> Iterator[StepBar | None]:
        """Inside the `with` block, what shows epochs and evaluations of this process; None: nothing."""
        yield None


BARS: Registry[Bars] = Registry("bars")
"""Those of plug-ins; the last ones are used."""


def bars() -> Bars:
    return BARS.last or Bars()
