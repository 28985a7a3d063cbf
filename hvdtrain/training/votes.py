"""All ranks learn after the same update what one of them wants: to stop, to save, or to report a loss that is not finite.

No rank waits for this: after every N updates (about a tenth of a second; a second if ranks update alone), each rank starts an
all-reduce of a few numbers, and reads its result when it starts the next one. So what one rank wants is known to all after two
such intervals, after the same update, and the exchange runs while they compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from hvdtrain.comm.base import Communicator, Tensor

INTERVAL = 0.1
"""Seconds between two exchanges, if updates take less time than that."""

INTERVAL_APART = 1.0
"""The same if ranks do not wait for each other in every update: more exchanges would slow down a rank that runs ahead."""


@dataclass(frozen=True)
class Wishes:
    """What this rank wants (0 or 1), or the number of ranks that want it.

    Attributes:
        stop: end the training with a checkpoint. After Ctrl-C, this is `stop_by_hand`.
        save: write a checkpoint.
        report: report a loss that is not finite.
    """

    stop: int = 0
    stop_by_hand: int = 0
    save: int = 0
    report: int = 0


NONE = Wishes()


class Ballot:
    """Counts wishes. Collective: all ranks call `step` after every update of a training and every step of an evaluation.

    Args:
        tensor: makes a tensor that can be sent to other ranks (`Learner.numbers`).
        interval: seconds between two exchanges.
    """

    def __init__(
        self,
        comm: Communicator,
        tensor: Callable[[Sequence[float]], Tensor],
        interval: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._comm = comm
        self._tensor = tensor
        self._interval = interval
        self._clock = clock
        self._handle: object = None
        self._since = clock()
        self._every = 1
        self._steps = 0

    def step(self, wishes: Callable[[], Wishes]) -> Wishes:
        """The ranks' wishes, if they have become known after this update or step.

        Args:
            wishes: gives this rank's; called when an exchange starts.
        """
        self._steps += 1
        if self._steps < self._every:
            return NONE
        counted = self.finish()
        seconds, self._since = self._clock() - self._since, self._clock()
        wanted = max(1, min(10 * self._steps, round(self._steps * self._interval / max(seconds, 1e-6))))
        # Rank 0 decides on the interval, as the ranks' clocks may differ.
        numbers = [*astuple(wishes()), wanted if self._comm.rank == 0 else 0]
        self._handle = self._comm.start([self._tensor(numbers)], "sum", name="wishes")
        self._steps = 0
        return counted

    def finish(self) -> Wishes:
        """Collective. The result of the last exchange; waits for it if necessary."""
        if self._handle is None:
            return NONE
        [numbers] = self._comm.finish(self._handle)
        self._handle = None
        *counts, self._every = (round(float(number)) for number in numbers)
        return Wishes(*counts)
