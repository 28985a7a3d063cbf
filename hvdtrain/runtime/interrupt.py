"""Stopping a training in an orderly way: on a signal, or before its time limit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, Self

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative
from hvdtrain.errors import STOP_SIGNALS, TO_BE_CONTINUED, HvdtrainError, Outcome, Problem, problem

UNLESS_HANDLED = (signal.SIGHUP, signal.SIGUSR2)
"""Left alone where nohup ignores them, or the config handles them."""


def seconds_of(limit: float | str) -> float:
    """Convert a number of seconds, 'mm:ss', 'hh:mm:ss' or Slurm's 'd-hh:mm:ss' to seconds. Raises: ValueError.

    >>> seconds_of("1:30:00"), seconds_of("2-00:00:10"), seconds_of(90)
    (5400.0, 172810.0, 90.0)
    """
    days, _, clock = str(limit).rpartition("-") if isinstance(limit, str) else ("", "", str(limit))
    fields = clock.split(":")
    if len(fields) > 3 or not all(fields) or (days and not days.isdigit()):
        raise ValueError(f"not a time: {limit!r}")
    seconds = 0.0
    for field in fields:
        seconds = 60 * seconds + float(field)
    return 86400 * int(days or 0) + seconds


def _is_time(value: Any) -> bool:
    try:
        return seconds_of(value) > 0
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class InterruptKeys(Section):
    """The time limit of a job."""

    time_limit: float | str | None = key(
        None,
        "stop with a checkpoint and exit status 75 before the job, with its restarts, has run this long: seconds, 'hh:mm:ss' or "
        "'d-hh:mm:ss'",
        Rule("a positive number of seconds, or a time such as '23:30:00' or '1-12:00:00'", _is_time),
    )
    time_limit_margin: float = key(
        60.0, "stop this many seconds before time_limit, to leave time for two training steps and saving", not_negative
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        if self.time_limit is not None and seconds_of(self.time_limit) <= self.time_limit_margin:
            return problem(
                "conflict",
                f"time_limit_margin: expected less than time_limit ({seconds_of(self.time_limit):g} s), "
                f"got {self.time_limit_margin:g}",
            )
        return []

    @property
    def seconds(self) -> float | None:
        """The seconds after which to stop; None: no limit."""
        return None if self.time_limit is None else seconds_of(self.time_limit) - self.time_limit_margin


class Stopped(HvdtrainError):
    """The training was stopped early, with a checkpoint, on all ranks at the same step.

    Args:
        repeatable: see `Outcome`.

    Attributes:
        is_printed: the message has been printed already.
        is_recorded: the folder's records have it already.
    """

    is_printed = False
    is_recorded = False

    def __init__(self, message: str, status: int = TO_BE_CONTINUED, *, repeatable: bool = True) -> None:
        super().__init__(message)
        self.outcome = Outcome(status, "all ranks", repeatable)

    @classmethod
    def before_training(cls, reason: str) -> Stopped:
        """The error of a rank that stops while the job starts. It cannot tell the others, which may wait for it."""
        stopped = cls(f"stopped by {reason} before the first step; the same command starts again")
        return stopped._with(outcome=replace(stopped.outcome, scope="this rank"))

    def as_printed(self) -> Self:
        """The same error, marked as printed."""
        return self._with(is_printed=True)


class Interrupt:
    """Records signals and the time limit; a context manager that restores the former signal handlers on exit.

    `STOP_SIGNALS` are recorded as the `reason` to stop; a second SIGINT raises KeyboardInterrupt. Before `defer` is called, there
    is nothing to save yet: then SIGINT raises KeyboardInterrupt, and the others raise Stopped.

    Args:
        seconds: from now on, the time limit; None: no limit.
        grace: the seconds for which the launcher lets ranks live after a signal to stop; None: as long as they need.

    Attributes:
        on_sigterm: called at once on the first SIGTERM; it must not raise.
        seconds_to_save: what the last checkpoint took; None: there was none.
    """

    def __init__(self, seconds: float | None, grace: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.grace = grace
        self.seconds_to_save: float | None = None
        self._clock = clock
        self._deadline = None if seconds is None else clock() + seconds
        self._former: dict[signal.Signals, Any] = {}
        self._defers = False
        self._parent = os.getppid()
        self._signal: signal.Signals | None = None
        self.on_sigterm: Callable[[], object] = lambda: None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python sets signal handlers only there
            for number in STOP_SIGNALS:
                if number not in UNLESS_HANDLED or signal.getsignal(number) == signal.SIG_DFL:
                    self._former[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def defer(self) -> None:
        """Record signals from now on. The caller checks `reason` regularly and saves a checkpoint."""
        self._defers = True

    @property
    def reason(self) -> str | None:
        """The reason to stop: a signal's name, 'time_limit' or 'the end of its launcher'; None: continue."""
        if self._signal == signal.SIGTERM and os.getppid() != self._parent:  # sent by comm/child.py
            return "the end of its launcher"
        if self._signal is not None:
            return self._signal.name
        if self._deadline is not None and self._clock() >= self._deadline:
            return "time_limit"
        return None

    def _record(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received == signal.SIGINT and (not self._defers or self._signal == signal.SIGINT):
            raise KeyboardInterrupt
        is_first = self._signal is None
        self._signal = received
        if not self._defers:
            raise Stopped.before_training(self.reason or received.name)
        if received == signal.SIGTERM and is_first:
            self.on_sigterm()
