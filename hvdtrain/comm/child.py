"""A child process of a launcher: it ends with its parent, and leaves hvdtrain's launcher what an exit status cannot express."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hvdtrain.disk.atomic import write_atomically
from hvdtrain.errors import HvdtrainError

PARENT = "HVDTRAIN_PARENT"
"""The environment variable with the process id of hvdtrain's launcher."""

ENDED = "HVDTRAIN_ENDED"
"""The environment variable with the common prefix of the files by which processes report to hvdtrain's launcher that their work
is done. An exit status of 0 alone does not prove that: code of the config may call `os._exit(0)`."""

TIMES = "HVDTRAIN_TIMES"
"""The environment variable with the times, of the monotonic clock, at which hvdtrain's launcher began, and lost ranks that it
restarted."""

PEER_FAILED = 76
"""Exit status of a process of hvdtrain's launcher that ends only because another one failed. The launcher returns 1."""

HUNG = 77
"""Exit status of a process of hvdtrain's launcher that hung and was ended by its watchdog. The launcher returns 1."""

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


def times_in(environ: Mapping[str, str]) -> list[float]:
    """The times of day in the variable TIMES, by the clock as it is set now."""
    ahead = time.time() - time.monotonic()
    return [float(text) + ahead for text in environ[TIMES].split(",")]


def report_end(environ: Mapping[str, str], rank: int) -> None:
    """Report to hvdtrain's launcher that the work of this process is done."""
    _end_file(environ[ENDED], rank).touch()


def has_ended(prefix: str, rank: int) -> bool:
    """Whether a process has reported that its work is done.

    Args:
        prefix: the value of ENDED.
    """
    return _end_file(prefix, rank).exists()


def report_cause(prefix: str) -> None:
    """Report to the processes that end because of another one that the cause has been printed.

    Args:
        prefix: the value of ENDED.
    """
    _cause_file(prefix).touch()


def wait_for_cause(environ: Mapping[str, str], seconds: float) -> None:
    """Wait until hvdtrain's launcher has reported that, for some seconds at most."""
    file = _cause_file(environ[ENDED])
    deadline = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


class Check(Protocol):
    """A picklable object that finds out what may have ended a process."""

    def check(self) -> None:
        """Raises: HvdtrainError, with the cause."""
        ...


def leave_checks(environ: Mapping[str, str], rank: int, checks: Sequence[Check]) -> None:
    """Leave hvdtrain's launcher the checks to run if a signal ends this process.

    The same signal may end the other ranks at the same time, so that none of them could report the cause.
    """
    write_atomically(_checks_file(environ[ENDED], rank), pickle.dumps(list(checks)))


def run_checks(prefix: str, rank: int) -> Iterator[str]:
    """Run the checks that a process left; yield the messages of those that fail."""
    path = _checks_file(prefix, rank)
    for check in pickle.loads(path.read_bytes()) if path.exists() else ():
        try:
            check.check()
        except HvdtrainError as error:
            yield str(error)


def _end_file(prefix: str, rank: int) -> Path:
    return Path(f"{prefix}.{rank}")


def _cause_file(prefix: str) -> Path:
    return Path(f"{prefix}.cause")


def _checks_file(prefix: str, rank: int) -> Path:
    return Path(f"{prefix}.{rank}.checks")
