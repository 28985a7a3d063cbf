"""The measurement of a start, and how often checkpoints should be written by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from math import sqrt
from typing import Any

from hvdtrain.plugins.goodput.spent import Spent, this_boot
from hvdtrain.runtime import log
from hvdtrain.runtime.goodput import AHEAD, Goodput, steady_time
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.runtime.timer import Timer, clock_text

USEFUL = ("compute", "communication", "parameter sync", "evaluation")
"""The activities of a `Timer` for which a training is run."""

FIRST_SAVE = 10.0
"""Seconds after which a checkpoint is written that shows how long that takes."""

SHORTEST = 1.0
"""The smallest interval between checkpoints in seconds."""


class MeasuredGoodput(Goodput):
    """Measures where the seconds of this start go.

    Args:
        timer: the job's.
        before: what was spent before this start.
        began: when it began; None: now.
        clock: the time of day, which the starts of a training share.
    """

    def __init__(
        self, timer: Timer, before: Spent | None = None, began: float | None = None, clock: Callable[[], float] = steady_time
    ) -> None:
        self._timer = timer
        self._before = before or Spent()
        self._clock = clock
        self._began = clock() if began is None else began
        self._going_on: float | None = None
        self._counted: Mapping[str, float] = {}  # activities before that
        self._saves = 0

    @property
    def seconds(self) -> float:
        return self.spent().seconds

    def go_on(self) -> None:
        """The start is over: the first epoch begins or goes on."""
        self._going_on = self._clock()
        self._counted = self._timer.total()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Logs the goodput at the end, but not after an error."""
        self.go_on()
        try:
            yield
        except Stopped:
            log.row(3, self.spent().line())
            raise
        log.row(3, self.spent().line())

    def count_save(self) -> None:
        self._saves += 1

    def spent(self, is_end: bool = False) -> Spent:
        """What has been spent until now, in all starts."""
        now = self._clock()
        before = self._before
        since = now if self._going_on is None else self._going_on
        starting = max(0.0, since - self._began)
        total = {} if self._going_on is None else self._timer.total()
        seconds = {name: value - self._counted.get(name, 0.0) for name, value in total.items()}
        useful = sum(seconds.get(name, 0.0) for name in USEFUL)
        saving = seconds.get("saving", 0.0)
        waiting = seconds.get("data wait", 0.0)
        return Spent(
            until=now,
            useful=before.useful + useful,
            start=before.start + (0.0 if before.starts else starting),
            restart=before.restart + (starting if before.starts else 0.0),
            repeated=before.repeated,
            saving=before.saving + saving,
            waiting=before.waiting + waiting,
            rest=before.rest + max(0.0, now - since - useful - saving - waiting),
            starts=before.starts + 1,
            failures=before.failures,
            saves=before.saves + self._saves,
            is_end=is_end,
            boot=this_boot(),
            ahead=AHEAD,
        )

    def state(self, is_end: bool) -> dict[str, Any]:
        return asdict(self.spent(is_end))

    def entries(self) -> Mapping[str, float]:
        return self.spent().entries()

    def record(self) -> Mapping[str, float]:
        spent = self.spent()
        numbers = {name: value for name, value in asdict(spent).items() if name != "is_end"}
        return {"share": round(spent.goodput, 4), **numbers}

    def save_interval(self) -> float:
        """The seconds between two checkpoints that lose least, by what saving has cost and how often starts have failed."""
        spent = self.spent()
        return max(SHORTEST, best_interval(spent.saving / spent.saves, spent.life)) if spent.saves else FIRST_SAVE

    def save_minutes(self) -> float:
        return self.save_interval() / 60

    def describe_interval(self) -> str:
        """This interval and what it follows from, in words."""
        spent = self.spent()
        if not spent.saves:
            return f"a checkpoint after {FIRST_SAVE:.0f} s, which shows how long saving takes"
        cost = spent.saving / spent.saves
        failures = f"{spent.failures} failure{'s' * (spent.failures != 1)}"
        seconds = f"{self.save_interval():.3g} s"
        return f"a checkpoint every {seconds}, by {cost:.2g} s for each and {failures} in {clock_text(spent.seconds)}"


def best_interval(cost: float, life: float) -> float:
    """Daly's estimate of the best interval between checkpoints (2006), which refines Young's `sqrt(2 * cost * life)` (1974).

    Args:
        cost: seconds that a checkpoint takes.
        life: mean seconds between two failures.

    >>> round(best_interval(0.5, 24 * 3600)), round(best_interval(0.1, 60), 2), best_interval(9.0, 4.0)
    (294, 3.4, 4.0)
    """
    if cost >= 2 * life:
        return life
    ratio = cost / (2 * life)
    return sqrt(2 * cost * life) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost
