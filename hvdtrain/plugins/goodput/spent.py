"""Goodput: the share of a training's time that went into steps that stayed, over all its starts, and what took the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from hvdtrain.runtime.goodput import AHEAD
from hvdtrain.runtime.timer import clock_text

LOSSES = {
    "start": "start",
    "restart": "restarts",
    "repeated": "steps done again",
    "saving": "saving",
    "waiting": "waiting for data",
    "rest": "the rest",
}
"""What takes time besides, with its name in the log."""

JUMP = 10.0
"""Seconds by which the clock was set that are noticed."""


@cache
def this_boot() -> float:
    """A number of the host's boot, whose monotonic clock all its processes share; 0: unknown."""
    with suppress(OSError, ValueError):
        return float(int(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:12], 16))
    return 0.0


@dataclass(frozen=True)
class Spent:
    """Where the seconds of a training went, over all its starts, as rank 0 measured them.

    Attributes:
        until: the time up to which it counts.
        useful: training steps and evaluations whose results stayed.
        start: from the beginning of the first process until the first epoch.
        restart: from the end of a start until the next one goes on with an epoch. The time between two jobs does not count.
        repeated: steps after the checkpoint from which the next start went on.
        saving: waiting for checkpoints.
        waiting: waiting for batches.
        rest: planning epochs, reports, callbacks.
        starts: how often it was started.
        failures: how many of these starts ended otherwise than by a stop.
        saves: the number of checkpoints.
        is_end: whether the training ends here by itself, or by a stop.
        boot, ahead: the host's boot, and `AHEAD` of the process that counted.
    """

    until: float = 0.0
    useful: float = 0.0
    start: float = 0.0
    restart: float = 0.0
    repeated: float = 0.0
    saving: float = 0.0
    waiting: float = 0.0
    rest: float = 0.0
    starts: int = 0
    failures: int = 0
    saves: int = 0
    is_end: bool = False
    boot: float = 0.0
    ahead: float = 0.0

    @property
    def jump(self) -> float:
        """The seconds by which the clock was set since then; 0: not, or unknown. (So `until` is of another clock.)"""
        jump = AHEAD - self.ahead if self.boot and self.boot == this_boot() else 0.0
        return jump if abs(jump) > JUMP else 0.0

    @property
    def seconds(self) -> float:
        """All seconds."""
        return self.useful + sum(self.losses().values())

    @property
    def goodput(self) -> float:
        """The useful share, from 0 to 1."""
        return self.useful / self.seconds if self.seconds else 0.0

    @property
    def life(self) -> float:
        """The estimate of the mean seconds between failures. Half a failure more counts, so that it is twice the time so far as
        long as there was none (the mean of the rate with Jeffreys' prior)."""
        return self.seconds / (self.failures + 0.5)

    def losses(self) -> dict[str, float]:
        """The other seconds, by cause."""
        return {name: float(getattr(self, name)) for name in LOSSES}

    def entries(self) -> dict[str, float]:
        """The seconds and counts with the useful share, for reports."""
        numbers = {name: round(value, 3) for name, value in {"useful": self.useful, **self.losses()}.items()}
        return {"share": round(self.goodput, 4), **numbers, "saves": self.saves, "starts": self.starts, "failures": self.failures}

    @staticmethod
    def from_state(state: Any) -> Spent | None:
        """From its numbers by name; None: it is from an earlier release, or damaged."""
        names = {field.name for field in fields(Spent)}
        if not isinstance(state, Mapping) or not state:
            return None
        stored = {name: value for name, value in state.items() if name in names}
        if not all(isinstance(value, int | float) and isfinite(value) for value in stored.values()):
            return None
        return Spent(**stored)

    def line(self) -> str:
        """The line at the end of a start.

        >>> Spent(useful=93.0, start=4.0, repeated=3.0, starts=2, failures=1).line()
        'goodput: 93.0% of 0:01:40 in 2 starts; lost: start 4.0 s, steps done again 3.0 s'
        """
        lost = ", ".join(f"{LOSSES[name]} {value:.1f} s" for name, value in self.losses().items() if value >= 0.05)
        starts = f" in {self.starts} starts" if self.starts > 1 else ""
        return f"goodput: {self.goodput:.1%} of {clock_text(self.seconds)}{starts}" + (f"; lost: {lost}" if lost else "")


def before_start(saved: Spent | None, recorded: Spent | None, failures: Sequence[float], last_sign: float) -> Spent:
    """What was spent until the last start ended.

    Args:
        saved: up to the checkpoint from which training goes on; None: there is none.
        recorded: up to the last record of a start; None: there is none.
        failures: the times at which starts failed, as far as the launcher knows.
        last_sign: the time of the last sign of an earlier start.

    >>> saved = Spent(until=100, useful=80, start=20, starts=1)
    >>> before = before_start(saved, None, [130], last_sign=120)
    >>> before.seconds, before.useful, before.repeated, before.failures
    (130.0, 80, 30.0, 1)
    """
    saved = saved or Spent()
    last = saved if recorded is None or recorded.starts <= saved.starts else recorded
    repeated = last.repeated + last.useful - saved.useful
    if last.is_end or not last.starts:
        return replace(last, useful=saved.useful, repeated=repeated, is_end=False)
    later = [] if last.jump else [time for time in failures if time > last.until]
    until = max(last.until, later[0] if later else last.until if last.jump else last_sign)
    number = max(1, len(later))  # more than one: starts that failed before they could record anything
    return replace(
        last,
        until=until,
        useful=saved.useful,
        repeated=repeated + until - last.until,
        starts=last.starts + number - 1,
        failures=last.failures + number,
    )
