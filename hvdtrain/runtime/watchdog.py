"""Ending a process that makes no progress: neither MPI nor Horovod's Gloo notices a rank that hangs or was stopped."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from types import TracebackType


class Watchdog:
    """A thread that ends the process when nothing was heard from the main thread for too long; a context manager.

    It shows what every thread is doing, so the rank that does not stand inside a collective is the one that hangs.

    Args:
        patience: seconds without a sign of life that are too many.
        rank: for the message.
    """

    def __init__(self, patience: float, rank: int) -> None:
        self._patience = patience
        self._rank = rank
        self._heard = time.monotonic()
        self._doing = "starting"
        self._done = threading.Event()

    def beat(self, doing: str) -> None:
        """A sign of life: what is being done from now on."""
        self._heard = time.monotonic()
        self._doing = doing

    def __enter__(self) -> Watchdog:
        if sys.__stderr__ is not None:  # where native code crashes, or a mapped file was cut (SIGBUS), Python's stack is shown
            faulthandler.enable(sys.__stderr__)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()

    def _watch(self) -> None:
        interval = min(1.0, self._patience / 10)
        while not self._done.wait(interval):
            silent = time.monotonic() - self._heard
            if silent > self._patience:
                print(
                    f"rank {self._rank}: no progress for {silent:.0f} s (watchdog_timeout) in {self._doing}; its threads:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(all_threads=True)
                time.sleep(3 * interval)  # the others' watchdogs bark now: the launcher ends all as soon as one has ended
                os._exit(1)
