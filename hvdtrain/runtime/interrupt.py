"""Why a training is to end early: a signal, or its time is up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative
from hvdtrain.errors import HvdtrainError

TO_BE_CONTINUED = 75
"""Exit status of a training that was stopped and is to be started again: EX_TEMPFAIL of sysexits.h."""

BY_CTRL_C = 130
"""Exit status after Ctrl-C, as shells have it: nobody starts that again by himself."""

STOPPING = (signal.SIGTERM, signal.SIGUSR1)


def seconds_of(limit: float | str) -> float:
    """A time as seconds, from a number or from 'mm:ss', 'hh:mm:ss' or Slurm's 'd-hh:mm:ss'. Raises: ValueError.

    >>> seconds_of("1:30:00"), seconds_of("2-00:00:10"), seconds_of(90)
    (5400.0, 172810.0, 90.0)
    """
    days, _, clock = str(limit).rpartition("-") if isinstance(limit, str) else ("", "", str(limit))
    parts = clock.split(":")
    if len(parts) > 3 or any(not part for part in parts) or (days and not days.isdigit()):
        raise ValueError(f"no time: {limit!r}")
    seconds = 0.0
    for part in parts:
        seconds = 60 * seconds + float(part)
    return 86400 * int(days or 0) + seconds


def _is_time(value: Any) -> bool:
    try:
        return seconds_of(value) > 0
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class InterruptKeys(Section):
    """Ending in time."""

    time_limit: float | str | None = key(
        None,
        "stop with a checkpoint and status 75 before the training has run for so long: seconds, 'hh:mm:ss' or 'd-hh:mm:ss'",
        Rule("a positive number of seconds, or a time such as '23:30:00' or '1-12:00:00'", _is_time),
    )
    time_limit_margin: float = key(
        60.0, "seconds before time_limit at which to stop: for start-up, two training steps, and saving", not_negative
    )

    def problems(self, others: Sections = ALONE) -> list[str]:
        if self.time_limit is not None and seconds_of(self.time_limit) <= self.time_limit_margin:
            return [
                f"time_limit_margin: expected less than time_limit ({seconds_of(self.time_limit):g} s), "
                f"got {self.time_limit_margin:g}"
            ]
        return []

    @property
    def seconds(self) -> float | None:
        """After how many seconds to stop; None: never."""
        return None if self.time_limit is None else seconds_of(self.time_limit) - self.time_limit_margin


class Stopped(HvdtrainError):
    """Training ended early, with a checkpoint. Attributes: status: the program's exit status."""

    def __init__(self, message: str, status: int = TO_BE_CONTINUED) -> None:
        super().__init__(message)
        self.status = status


class Interrupt:
    """Remembers signals and watches the clock; a context manager that gives the signals their former meaning back.

    SIGTERM, SIGUSR1 and the first SIGINT are remembered; a second SIGINT is the KeyboardInterrupt it always was, and so is
    the first before `may_wait` was called: there is nothing to save yet.

    Args:
        seconds: how long to train at most; None: for ever.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = None if seconds is None else clock() + seconds
        self._former: dict[signal.Signals, Any] = {}
        self._may_wait = False
        self._signal: signal.Signals | None = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            for number in (*STOPPING, signal.SIGINT):
                self._former[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def may_wait(self) -> None:
        """From now on somebody asks for `reason` often, and saves."""
        self._may_wait = True

    @property
    def reason(self) -> str | None:
        """Why to stop: 'SIGTERM', 'SIGUSR1', 'SIGINT', 'time_limit'; None: go on."""
        if self._signal is not None:
            return self._signal.name
        if self._deadline is not None and self._clock() >= self._deadline:
            return "time_limit"
        return None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        arrived = signal.Signals(number)
        if arrived == signal.SIGINT and (not self._may_wait or self._signal == signal.SIGINT):
            raise KeyboardInterrupt
        self._signal = arrived
