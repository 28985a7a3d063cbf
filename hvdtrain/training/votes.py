"""All ranks learn at the same step what one of them wants: to stop, to save, to report a loss that is no number.

Nobody waits for it: every so many steps (about a tenth of a second; a second where ranks train apart) each rank hands a few
numbers to an all-reduce, and looks at their sum when it hands over the next ones. So what one rank wants is known to all after
two such intervals, at the same step, and the exchange goes on beside the computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

from hvdtrain.comm.base import Communicator
from hvdtrain.learner.base import Learner

INTERVAL = 0.1
"""Seconds between two exchanges, if steps are shorter than that."""

INTERVAL_APART = 1.0
"""The same where ranks do not meet in every step: more exchanges would keep a fast one from running ahead."""


@dataclass(frozen=True)
class Wishes:
    """What this rank wants, or how many ranks want it.

    Attributes:
        stop: end the training with a checkpoint; after Ctrl-C: `stop_by_hand`.
        save: write a checkpoint.
        report: a loss is no finite number.
    """

    stop: int = 0
    stop_by_hand: int = 0
    save: int = 0
    report: int = 0


NONE = Wishes()


class Ballot:
    """Counts wishes. Collective: all ranks call `step` equally often, after every step of a training or an evaluation.

    Args:
        interval: seconds between two exchanges.
    """

    def __init__(
        self, comm: Communicator, learner: Learner, interval: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._comm = comm
        self._learner = learner
        self._interval = interval
        self._clock = clock
        self._handle: object = None
        self._since = clock()
        self._every = 1
        self._steps = 0

    def step(self, wishes: Callable[[], Wishes]) -> Wishes:
        """The ranks' wishes, where they have become known after this step.

        Args:
            wishes: this rank's; asked for when they are handed over.
        """
        self._steps += 1
        if self._steps < self._every:
            return NONE
        counted = self.finish()
        seconds, self._since = self._clock() - self._since, self._clock()
        wanted = max(1, min(10 * self._steps, round(self._steps * self._interval / max(seconds, 1e-6))))
        # How often to ask is rank 0's to decide; the ranks' clocks may differ.
        numbers = [*astuple(wishes()), wanted if self._comm.rank == 0 else 0]
        self._handle = self._comm.start([self._learner.numbers(numbers)], "sum", name="wishes")
        self._steps = 0
        return counted

    def finish(self) -> Wishes:
        """Collective. What was handed over last, waiting for it if need be."""
        if self._handle is None:
            return NONE
        [numbers] = self._comm.finish(self._handle)
        self._handle = None
        *counts, self._every = (round(float(number)) for number in numbers)
        return Wishes(*counts)
