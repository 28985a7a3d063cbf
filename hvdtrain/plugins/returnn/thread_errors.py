"""Errors of threads that RETURNN's datasets start."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WAKE = signal.SIGRTMIN + 8
"""Signal from a thread that fails to the main thread of the same process."""


class ThreadErrors:
    """Raises errors that end threads of a worker process in its main thread, which may be waiting forever for such a thread."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._raising = False

    def watch(self) -> None:
        """Catch such errors from now on. Call it in the main thread."""
        signal.signal(WAKE, self._wake)
        threading.excepthook = self._record

    @contextmanager
    def reraise(self) -> Iterator[None]:
        """Raise the first error of a thread inside the `with` block or at its end.

        Raises:
            ThreadFailed: with that error as its cause; also in place of an exception that may be a consequence of it.
        """
        self._raising = True
        try:
            self._raise()
            yield
            self._raise()
        except Exception:
            self._raise()
            raise
        finally:
            self._raising = False

    def _raise(self) -> None:
        if self._error is not None:
            raise ThreadFailed from self._error

    def _wake(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, whatever it does or waits for."""
        if self._raising:
            self._raise()

    def _record(self, ended: threading.ExceptHookArgs) -> None:
        """Runs in a thread that an exception ends."""
        error = ended.exc_value
        if isinstance(error, SystemExit):  # RETURNN's threads print their errors and exit with 1
            error = error.__context__ if error.code else None
        else:
            threading.__excepthook__(ended)
        if error is not None and self._error is None:
            self._error = error
            signal.pthread_kill(threading.main_thread().ident or 0, WAKE)


class ThreadFailed(BaseException):
    """A thread of this process has failed. It passes through code that catches every `Exception` while it waits."""
