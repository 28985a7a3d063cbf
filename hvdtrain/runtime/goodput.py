"""Goodput: the share of a training's time that went into steps that stayed, over all its starts, and what took the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from hvdtrain.runtime.timer import Timer, clock_text

USEFUL = ("compute", "communication", "parameter sync", "evaluation")
"""The activities of a `Timer` for which a training is run."""

LOSSES = {
    "start": "start",
    "restart": "restarts",
    "repeated": "steps done again",
    "saving": "saving",
    "waiting": "waiting for data",
    "rest": "the rest",
}
"""What takes time besides, with its name in the log."""

FIRST_SAVE = 10.0
"""Seconds after which a checkpoint is written that shows how long that takes."""

SHORTEST = 1.0
"""The smallest interval between checkpoints in seconds."""


AHEAD = time.time() - time.monotonic()
"""By how much the clock was ahead of the seconds of the host's boot when this process began."""

JUMP = 10.0
"""Seconds by which the clock was set that are noticed."""


def steady_time() -> float:
    """The time of day, but for jumps of the clock since this process began: differences are durations."""
    return time.monotonic() + AHEAD


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

    def state(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)

    def entries(self) -> dict[str, float]:
        """The same with its share, for reports."""
        numbers = {name: round(value, 3) for name, value in {"useful": self.useful, **self.losses()}.items()}
        return {"share": round(self.goodput, 4), **numbers, "saves": self.saves, "starts": self.starts, "failures": self.failures}

    @staticmethod
    def from_state(state: Any) -> Spent | None:
        """What `state` returned; None: it is from an earlier release, or damaged."""
        names = {field.name for field in fields(Spent)}
        if not isinstance(state, Mapping) or not state:
            return None
        known = {name: value for name, value in state.items() if name in names}
        if not all(isinstance(value, int | float) and isfinite(value) for value in known.values()):
            return None
        return Spent(**known)

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


class Goodput:
    """Measures where the seconds of this start go. Reports read it on rank 0.

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

    def go_on(self) -> None:
        """The start is over: the first epoch begins or goes on."""
        self._going_on = self._clock()
        self._counted = self._timer.total()

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

    def entries(self) -> dict[str, float]:
        """What has been spent until now, for reports."""
        return self.spent().entries()

    def record(self) -> dict[str, Any]:
        """What has been spent until now, for the record of a start."""
        spent = self.spent()
        numbers = {name: value for name, value in spent.state().items() if name != "is_end"}
        return {"share": round(spent.goodput, 4), **numbers}

    def save_interval(self) -> float:
        """The seconds between two checkpoints that lose least, by what saving has cost and how often starts have failed."""
        spent = self.spent()
        return max(SHORTEST, best_interval(spent.saving / spent.saves, spent.life)) if spent.saves else FIRST_SAVE

    def save_minutes(self) -> float:
        """The same in minutes."""
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


def process_began(pid: int | None = None) -> float:
    """The time at which a process of this host began, by default this one; now, if it is unknown."""
    now = steady_time()
    try:
        ticks = Path(f"/proc/{os.getpid() if pid is None else pid}/stat").read_text(encoding="utf-8", errors="replace")
        after_boot = float(ticks.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        boot = now - float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return now
    return min(now, boot + after_boot)
