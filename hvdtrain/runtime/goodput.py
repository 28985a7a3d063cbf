"""Where the seconds of a training go: what a plug-in measures; and the times from which it and time limits count."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from hvdtrain.config.plugins import Registry

AHEAD = time.time() - time.monotonic()
"""By how much the clock was ahead of the seconds of the host's boot when this process began."""


def steady_time() -> float:
    """The time of day, but for jumps of the clock since this process began: differences are durations."""
    return time.monotonic() + AHEAD


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


class Goodput:
    """Measures where the seconds of a training go, over all its starts; this one measures nothing. Reports read it on rank 0."""

    @property
    def seconds(self) -> float | None:
        """All seconds so far; None: unknown."""
        return None

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the epochs: what comes before is the start."""
        yield

    def count_save(self) -> None:
        """A checkpoint was written."""

    def save_minutes(self) -> float:
        """The minutes between two checkpoints that lose least."""
        return inf

    def state(self, is_end: bool) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers.

        Args:
            is_end: whether the training ends with it.
        """
        return {}

    def entries(self) -> Mapping[str, float] | None:
        """For the report of an epoch."""
        return None

    def record(self) -> Mapping[str, float]:
        """For the record of a start."""
        return {}


ACCOUNTS: Registry[Callable[[Any, Any, float], Goodput]] = Registry("accounts")
"""Those of plug-ins, functions of the settings, the `Session` and the time at which the work of this start began; the last one is
used."""
