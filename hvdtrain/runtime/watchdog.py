"""The watchdog ends a process that makes no progress: neither MPI nor Horovod's Gloo detects a rank that hangs or is stopped."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from types import TracebackType


class Watchdog:
    """A context manager with a thread that ends the process if the main thread does not call `beat` for too long.

    It prints the stack of every thread first: the rank whose main thread is not in a collective is the one that hangs.

    Args:
        timeout: seconds without a call of `beat` after which to end the process.
        rank: this process's rank, for the message.
    """

    def __init__(self, timeout: float, rank: int) -> None:
        self._timeout = timeout
        self._rank = rank
        self._last_beat = time.monotonic()
        self._activity = "starting"
        self._done = threading.Event()

    def beat(self, activity: str) -> None:
        """Reset the timeout, and record what the process does from now on, for the message."""
        self._last_beat = time.monotonic()
        self._activity = activity

    def __enter__(self) -> Watchdog:
        if sys.__stderr__ is not None:  # print Python's stack if native code crashes or a mapped file was truncated (SIGBUS)
            faulthandler.enable(sys.__stderr__)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()

    def _watch(self) -> None:
        interval = min(1.0, self._timeout / 10)
        while not self._done.wait(interval):
            silent = time.monotonic() - self._last_beat
            if silent > self._timeout:
                print(
                    f"rank {self._rank}: no progress for {silent:.0f} s (watchdog_timeout) in {self._activity}; its threads:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(all_threads=True)
                time.sleep(3 * interval)  # the other ranks' watchdogs report, too, before the launcher ends all of them
                os._exit(1)
