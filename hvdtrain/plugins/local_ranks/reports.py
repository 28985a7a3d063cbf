"""What the launcher tells a rank by its environment, and what a rank leaves for it that an exit status cannot express."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.comm.launchers import Check, Place
from hvdtrain.disk.atomic import write_atomically
from hvdtrain.errors import HvdtrainError

PLACE = ("HVDTRAIN_RANK", "HVDTRAIN_SIZE", "HVDTRAIN_LOCAL_RANK", "HVDTRAIN_LOCAL_SIZE")
"""The environment variables with the place of a process."""

PARENT = "HVDTRAIN_PARENT"
"""The environment variable with the process id of hvdtrain's launcher."""

ENDED = "HVDTRAIN_ENDED"
"""The environment variable with the common prefix of the files by which processes report to hvdtrain's launcher that their work
is done. An exit status of 0 alone does not prove that: code of the config may call `os._exit(0)`."""

CAUSE = "cause"
"""The file by which the launcher reports to the processes that end because of another one that the cause has been printed."""

TIMES = "HVDTRAIN_TIMES"
"""The environment variable with the times, of the monotonic clock, at which hvdtrain's launcher began, and lost ranks that it
restarted."""

PEER_FAILED = 76
"""Exit status of a process of hvdtrain's launcher that ends only because another one failed. The launcher returns 1."""

HUNG = 77
"""Exit status of a process of hvdtrain's launcher that hung and was ended by its watchdog. The launcher returns 1."""


def variables(place: Place) -> dict[str, str]:
    """The environment variables from which a process that is started learns its place."""
    numbers = (place.rank, place.size, place.local_rank, place.local_size)
    return {name: str(number) for name, number in zip(PLACE, numbers, strict=True)}


def times_in(environ: Mapping[str, str]) -> list[float]:
    """The times of day in the variable TIMES, by the clock as it is set now."""
    ahead = time.time() - time.monotonic()
    return [float(text) + ahead for text in environ[TIMES].split(",")]


def report_file(prefix: str, name: str | int) -> Path:
    """A file by which a process reports to another one that something has happened.

    Args:
        prefix: the value of ENDED.
        name: the rank, whose work is done; or `CAUSE`.
    """
    return Path(f"{prefix}.{name}")


def wait_for_cause(environ: Mapping[str, str], seconds: float) -> None:
    """Wait until hvdtrain's launcher has reported that it printed the cause, for some seconds at most."""
    file = report_file(environ[ENDED], CAUSE)
    deadline = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def leave_checks(environ: Mapping[str, str], rank: int, checks: Sequence[Check]) -> None:
    """Leave hvdtrain's launcher the checks to run if a signal ends this process.

    The same signal may end the other ranks at the same time, so that none of them could report the cause.
    """
    write_atomically(report_file(environ[ENDED], f"{rank}.checks"), pickle.dumps(list(checks)))


def run_checks(prefix: str, rank: int) -> Iterator[str]:
    """Run the checks that a process left; yield the messages of those that fail."""
    path = report_file(prefix, f"{rank}.checks")
    for check in pickle.loads(path.read_bytes()) if path.exists() else ():
        try:
            check.check()
        except HvdtrainError as error:
            yield str(error)
