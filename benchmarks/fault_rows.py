"""The faults of faults.py: a row of its table is a function that does the damage, within a rank or from outside.

A fault passes only if its job does not end with status 0, leaves no process and no damaged checkpoint, and prints what names the
fault. Only Python's own modules are imported here: the ranks import this file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OF_RANK_1 = r"rank[: ]+1\b|,1\]|Process name: (\S+\[)?1\b"
"""How the launchers name rank 1: hvdtrain, torchrun and srun; mpirun; horovodrun."""


@dataclass(frozen=True)
class Row:
    """A fault.

    Attributes:
        text: in the table.
        happen: does the damage; called in the training step of rank 1, or in the process of faults.py.
        names: a regular expression that has to be found in what the job prints; None: there is nothing that could be named.
        within: whether rank 1 does it.
        needs_root: to mount a separate file system.
    """

    text: str
    happen: Callable[[Place], None]
    names: str | None
    within: bool = True
    needs_root: bool = False


@dataclass(frozen=True)
class Place:
    """Where the job runs.

    Attributes:
        folder: with the file system `disk`, on which the model is.
        launcher: the process id of the launcher.
    """

    folder: Path
    launcher: int = 0

    @property
    def data(self) -> Path:
        """The HDF file with the training data, which is memory-mapped."""
        return self.folder / "train.hdf"


ROWS: dict[str, Row] = {}


def row(
    text: str, names: str | None, within: bool = True, needs_root: bool = False
) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Add a function to the table."""

    def add(happen: Callable[[Place], None]) -> Callable[[Place], None]:
        ROWS[happen.__name__] = Row(text, happen, names, within, needs_root)
        return happen

    return add


@row("a rank raises an exception", r"RuntimeError: planted")
def raises(place: Place) -> None:
    raise RuntimeError("planted")


@row("`sys.exit(0)` of a rank", r"SystemExit: 0")
def leaves(place: Place) -> None:
    sys.exit(0)


@row("`os._exit(3)` of a rank", OF_RANK_1)
def exits(place: Place) -> None:
    os._exit(3)


@row("`os._exit(0)` of a rank", OF_RANK_1)
def exits_well(place: Place) -> None:
    os._exit(0)


@row("SIGKILL of a rank", OF_RANK_1)
def killed(place: Place) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@row("a rank reads through a null pointer", OF_RANK_1)
def crashes(place: Place) -> None:
    ctypes.string_at(0)


@row("SIGSTOP of a rank, `++watchdog_timeout 10`", r"rank 1 on \S+ has given no sign of life .* is stopped \(SIGSTOP\)")
def stopped(place: Place) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@row("a rank hangs, `++watchdog_timeout 10`", r"rank 1(: no progress| on \S+ hangs)[^\n]* \(watchdog_timeout\)")
def hangs(place: Place) -> None:
    time.sleep(3600)


@row("reading blocks for ever, `++watchdog_timeout 10`", r"rank 1(: no progress| on \S+ hangs)[^\n]* \(watchdog_timeout\)")
def blocks(place: Place) -> None:
    (place.folder / "blocked").touch()  # for `slowly` of the config


@row(
    "a mapped data file is cut off",
    r"train\.hdf: expected the file that was opened at the start, got one of 4096 bytes|SIGBUS|Bus error",
)
def cut_off(place: Place) -> None:
    os.truncate(place.data, 4096)


@row("a data file is replaced", r"train\.hdf: expected the file that was opened at the start, got another file in its place")
def replaced(place: Place) -> None:
    copy = place.data.with_suffix(".new")
    copy.write_bytes(place.data.read_bytes())
    copy.rename(place.data)


@row(
    "the disk of the model is full",
    r"model\.\S+: expected to write a checkpoint, got: [^\n]*No space left on device",
    needs_root=True,
)
def disk_full(place: Place) -> None:
    with open(place.folder / "disk" / "other", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


@row("the loss of a rank is not a number", r"rank 1: ce = nan in step")
def not_a_number(place: Place) -> None:
    (place.folder / "nan").touch()  # for `train_step` of the config


@row("SIGKILL of the launcher", None, within=False)
def launcher_killed(place: Place) -> None:
    os.kill(place.launcher, signal.SIGKILL)
