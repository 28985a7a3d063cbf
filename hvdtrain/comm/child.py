"""A process as a child of the one that started it: it ends with it, and leaves hvdtrain's launcher what no exit status says."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hvdtrain.errors import HvdtrainError

PARENT = "HVDTRAIN_PARENT"
"""The environment variable with the process id of hvdtrain's launcher."""

ENDED = "HVDTRAIN_ENDED"
"""The environment variable with the beginning of the names of files by which processes tell hvdtrain's launcher that their work
is done: an exit status of 0 alone, as of `os._exit(0)`, does not."""

PEER_FAILED = 76
"""Exit status of a process of hvdtrain's launcher that ends only because another one has failed. The launcher returns 1."""

HUNG = 77
"""Exit status of a process of hvdtrain's launcher that its watchdog has ended, as it hung. The launcher returns 1."""

TERMINATE_TIMEOUT = 5.0
"""Seconds between SIGTERM and SIGKILL."""

STOP_TIMEOUT = 60.0
"""Seconds that ranks without a launcher have to stop with a checkpoint; nobody else would end one that hangs."""


def end_with(parent: int | None) -> None:
    """Watch the process that started this one, if there is one to watch, and stop when it is gone.

    A training, which handles SIGTERM, stops with a checkpoint, as its other ranks do; anything else ends within seconds.
    """
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            time.sleep(TERMINATE_TIMEOUT)  # it may be about to end, with the other ranks
        else:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(STOP_TIMEOUT)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def note_end(environ: Mapping[str, str], rank: int) -> None:
    """Tell hvdtrain's launcher that the work of this process is done."""
    _mark(environ[ENDED], rank).touch()


def has_ended(prefix: str, rank: int) -> bool:
    """Whether a process has said that its work is done.

    Args:
        prefix: the value of ENDED.
    """
    return _mark(prefix, rank).exists()


class Check(Protocol):
    """Something that can be pickled, and that finds out what may have ended a process."""

    def check(self) -> None:
        """Raises: HvdtrainError, which says it."""
        ...


def leave_checks(environ: Mapping[str, str], rank: int, checks: Sequence[Check]) -> None:
    """Leave hvdtrain's launcher what to check if a signal ends this process.

    The other ranks may be ended by the same signal at the same time, and could not say anything either.
    """
    path = _checks(environ[ENDED], rank)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(list(checks)))
    unfinished.replace(path)


def found_by_checks(prefix: str, rank: int) -> Iterator[str]:
    """What the checks find that a process has left."""
    path = _checks(prefix, rank)
    for one in pickle.loads(path.read_bytes()) if path.exists() else ():
        try:
            one.check()
        except HvdtrainError as error:
            yield str(error)


def _mark(prefix: str, rank: int) -> Path:
    return Path(f"{prefix}.{rank}")


def _checks(prefix: str, rank: int) -> Path:
    return Path(f"{prefix}.{rank}.checks")
