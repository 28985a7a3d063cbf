"""When a training is saved, and when it is evaluated within an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.training.limits import TrainingLimits


class Interval:
    """Decides when something is due within an epoch: after which steps, and when it was last done too long ago.

    The first follows from the steps, so that all ranks decide alike. One rank measures the age and requests it.

    Args:
        steps: after every N steps of the whole training; None: not after certain steps.
        minutes: when it was last done so long ago, or a function that returns this; None: not by the clock.
        step: the number of steps of the whole training so far.
        has_clock: whether this rank measures the age.
    """

    def __init__(
        self,
        steps: int | None,
        minutes: float | Callable[[], float] | None,
        step: int,
        has_clock: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._minutes = minutes
        self._last_step = step  # at the last call of `is_due_after_step`
        self._has_clock = has_clock
        self._clock = clock
        self._done_at = clock()
        self._has_requested = False

    def is_due_after_step(self, step: int) -> bool:
        """Whether a multiple of N steps has been passed since the last call."""
        before, self._last_step = self._last_step, step
        every = self._steps
        return every is not None and step // every > before // every

    def should_request(self) -> bool:
        """Whether this rank should request it. True only once each time, as it takes another two exchanges until it is done."""
        minutes = self._minutes
        if minutes is None or not self._has_clock or self._has_requested:
            return False
        if self._clock() - self._done_at < 60 * (minutes() if callable(minutes) else minutes):
            return False
        self._has_requested = True
        return True

    def reset(self) -> None:
        """Measure the age from now on: it was done."""
        self._done_at = self._clock()
        self._has_requested = False


class SavePolicy(Interval):
    """Decides when to save: after which epochs and steps, and when the last checkpoint is too old.

    Args:
        best_minutes: returns the age for the limit "auto".
    """

    def __init__(
        self,
        limits: TrainingLimits,
        step: int,
        has_clock: bool,
        clock: Callable[[], float] = time.monotonic,
        *,
        best_minutes: Callable[[], float],
    ) -> None:
        minutes = best_minutes if limits.save_minutes == "auto" else limits.save_minutes
        super().__init__(limits.save_steps, minutes, step, has_clock, clock)
        self._epochs = limits.save_epochs

    def is_due_after_epoch(self, epoch: int, is_last: bool) -> bool:
        """Whether to save the model of a finished epoch."""
        return epoch % self._epochs == 0 or is_last
