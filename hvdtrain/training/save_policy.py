"""When a training is saved."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.training.limits import TrainingLimits


class SavePolicy:
    """Decides when to save: after which epochs and steps, and when the last checkpoint is too old.

    The first two follow from the limits, so that all ranks decide alike. One rank measures the age and requests a checkpoint.

    Args:
        step: the number of steps of the whole training so far.
        has_clock: whether this rank measures the age of the last checkpoint.
    """

    def __init__(self, limits: TrainingLimits, step: int, has_clock: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._last_step = step  # at the last call of `is_due_after_step`
        self._has_clock = has_clock
        self._clock = clock
        self._saved_at = clock()
        self._has_requested = False

    def is_due_after_epoch(self, epoch: int, is_last: bool) -> bool:
        """Whether to save the model of a finished epoch."""
        return epoch % self._limits.save_epochs == 0 or is_last

    def is_due_after_step(self, step: int) -> bool:
        """Whether a multiple of N steps has been passed since the last call."""
        before, self._last_step = self._last_step, step
        every = self._limits.save_steps
        return every is not None and step // every > before // every

    def should_request(self) -> bool:
        """Whether this rank should request a checkpoint. True only once for each: writing it takes another two exchanges."""
        minutes = self._limits.save_minutes
        if minutes is None or not self._has_clock or self._has_requested or self._clock() - self._saved_at < 60 * minutes:
            return False
        self._has_requested = True
        return True

    def reset(self) -> None:
        """Measure the age from now on: a checkpoint was written."""
        self._saved_at = self._clock()
        self._has_requested = False
