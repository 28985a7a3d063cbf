"""The watchdog ends a process that makes no progress: neither MPI nor Horovod's Gloo detects a rank that hangs or is stopped."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

Phase = Literal["start-up", "steps", "evaluation", "saving"]
"""What a rank is busy with. Each takes its own time."""

UNKNOWN = 1800.0
"""Seconds without progress that are allowed while nothing is known of a phase; in the start-up, always."""

LEAST, TIMES = 60.0, 20.0
"""Afterwards: this many seconds, or this many times the longest interval between two signs of progress so far."""


@dataclass
class Patience:
    """For how long a rank may be silent, by phase.

    The first interval of a phase does not count: frameworks compile in it.

    Args:
        fixed: the seconds instead, in all phases but the start-up, which no step's time says anything about.

    >>> patience = Patience()
    >>> patience.allowed("steps")
    1800.0
    >>> for seconds in (100.0, 0.5, 4.0):
    ...     patience.learn("steps", seconds)
    >>> patience.allowed("steps"), patience.allowed("evaluation"), Patience(fixed=15.0).allowed("steps")
    (80.0, 1800.0, 15.0)
    """

    fixed: float | None = None
    _longest: dict[Phase, float] = field(default_factory=dict)

    def learn(self, phase: Phase, seconds: float) -> None:
        """Take note of an interval between two signs of progress."""
        self._longest[phase] = max(self._longest[phase], seconds) if phase in self._longest else 0.0

    def allowed(self, phase: Phase) -> float:
        """Seconds."""
        if phase == "start-up":
            return UNKNOWN if self.fixed is None else max(UNKNOWN, self.fixed)
        if self.fixed is not None:
            return self.fixed
        longest = self._longest.get(phase, 0.0)
        return max(LEAST, TIMES * longest) if longest else UNKNOWN


class Watchdog:
    """A context manager with a thread that ends the process if the main thread does not call `beat` for too long.

    It prints the stack of every thread first: the rank whose main thread is not in a collective is the one that hangs. A rank
    that makes progress again while the others report is let go on, and so is one that was itself suspended.

    Args:
        timeout: seconds without a call of `beat` after which to end the process; None: by `Patience`.
        rank: this process's rank, for the message.
    """

    def __init__(self, timeout: float | None, rank: int) -> None:
        self._patience = Patience(timeout)
        self._interval = 1.0 if timeout is None else min(1.0, timeout / 10)
        self._rank = rank
        self._last_beat = time.monotonic()
        self._activity = "starting"
        self._phase: Phase = "start-up"
        self._done = threading.Event()

    def beat(self, activity: str, phase: Phase = "start-up") -> None:
        """Reset the timeout, and record what the process does from now on, for the message."""
        now = time.monotonic()
        self._patience.learn(self._phase, now - self._last_beat)
        self._last_beat = now
        self._activity, self._phase = activity, phase

    def __enter__(self) -> Watchdog:
        if sys.__stderr__ is not None:  # print Python's stack if native code crashes or a mapped file was truncated (SIGBUS)
            faulthandler.enable(sys.__stderr__)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._done.wait(self._interval):
            now = time.monotonic()
            suspended = now - looked > 10 * self._interval + 5  # the whole process, by SIGSTOP or the batch system
            looked = now
            if suspended:
                self._last_beat = now
            elif self._is_silent() and not self._goes_on():
                os._exit(1)

    def _is_silent(self) -> bool:
        return time.monotonic() - self._last_beat > self._patience.allowed(self._phase)

    def _goes_on(self) -> bool:
        """Report that there is no progress, and give the other ranks' watchdogs the time to do so, too, before the launcher ends
        all of them."""
        silent = time.monotonic() - self._last_beat
        print(
            f"rank {self._rank}: no progress for {silent:.0f} s (watchdog_timeout) in {self._activity}; its threads:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        time.sleep(3 * self._interval)
        if self._is_silent():
            return False
        print(f"rank {self._rank}: makes progress again, in {self._activity}", file=sys.stderr, flush=True)
        return True
