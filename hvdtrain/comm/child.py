"""A child process of a launcher ends with its parent."""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT_WATCH = "launcher"
"""The name of the thread of `end_with`, which sleeps nearly all the time."""

GONE = 0
"""The process id of a parent that has ended."""

TERMINATE_TIMEOUT = 5.0
"""Seconds between SIGTERM and SIGKILL."""

STOP_TIMEOUT = 60.0
"""Seconds that ranks whose launcher is gone have to stop with a checkpoint; afterwards they end themselves, even if they hang."""


def end_with(parent: int | None) -> None:
    """Watch the parent process, if there is one to watch, and stop when it is gone.

    A training, which handles SIGTERM, stops with a checkpoint, together with its other ranks; anything else ends within seconds.
    """
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            time.sleep(TERMINATE_TIMEOUT)  # it may be about to end by itself, as the other ranks do
        else:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(STOP_TIMEOUT)
        os._exit(1)

    threading.Thread(target=watch, name=PARENT_WATCH, daemon=True).start()
