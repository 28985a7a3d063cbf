"""The record of a training's ends (ends.jsonl).

Whoever ends a training appends a line: the training itself, at its normal end, at a stop and at an error; the watchdog, before it
ends a process; and hvdtrain's launcher, if ranks died. A training that was killed leaves no line, but its lock, whose heartbeat
(checkpoint/lock.py) has stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from hvdtrain.errors import TOLD_BY, HvdtrainError, Outcome
from hvdtrain.runtime.interrupt import Stopped

Status = Literal["finished", "stopped", "failed"]
"""How a training ended: after its last epoch or by early stopping; with a checkpoint to resume from; with an error."""

ENDS = "ends.jsonl"

WRITTEN = ("starts.jsonl", "scores.jsonl", "steps.jsonl", "evaluations.jsonl")
"""Files that show until when a training made progress."""

MOST_LETTERS = 2000
"""The most letters of a reason."""

LAUNCHER = "the launcher"

SECONDS_TO_COMPARE = 0.3
"""How long a rank waits for the others' records of an error, which may be of the same line of the config."""


@dataclass(frozen=True)
class End:
    """An end of a training: a line of ends.jsonl.

    Attributes:
        start: the number of the start that ended: that of the lines in starts.jsonl so far.
        why: the reason; empty for a training that finished.
        by: who recorded it: 'rank 0', 'the watchdog of rank 0', 'the launcher'.
        is_consequence: it ended because another rank did, whose record has the cause.
    """

    start: int
    status: Status
    why: str
    by: str
    is_consequence: bool = False
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %z"))


def append_end(folder: Path, status: Status, why: str, by: str, *, is_consequence: bool = False) -> None:
    """Append a line to the folder's ends.jsonl, if that is possible: a record must not be a cause of failures."""
    with suppress(Exception):
        end = End(num_starts(folder), status, why.strip()[:MOST_LETTERS], by, is_consequence)
        with (folder / ENDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(end)) + "\n")


@contextmanager
def record_end(folder: Path, rank: int) -> Iterator[None]:
    """Record how the training in the `with` block ends: by rank 0, and by another rank if it fails alone."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Stopped) and error.is_recorded:
            raise
        outcome = error.outcome if isinstance(error, HvdtrainError) else Outcome(1)
        is_stop = isinstance(error, Stopped | KeyboardInterrupt)
        if rank == 0 or (outcome.scope == "this rank" and not is_stop):
            by = f"rank {rank}"
            is_consequence = outcome.scope == "a peer"
            append_end(folder, "stopped" if is_stop else "failed", _why(error), by, is_consequence=is_consequence)
        if rank and not isinstance(error, HvdtrainError | KeyboardInterrupt):
            time.sleep(SECONDS_TO_COMPARE)
            setattr(error, TOLD_BY, _told_by(folder, rank, _why(error)))
        raise
    if rank == 0:
        append_end(folder, "finished", "", "rank 0")


def record_stop(folder: Path, rank: int, stopped: Stopped) -> None:
    """Record a stop before the ranks disconnect: mpirun may kill them meanwhile."""
    if rank == 0:
        append_end(folder, "stopped", str(stopped), "rank 0")
    stopped.is_recorded = True


def _told_by(folder: Path, rank: int, why: str) -> str | None:
    """The first rank, before this one, whose error in this start was the same."""
    with suppress(OSError):
        start = num_starts(folder)
        of_ranks = [end.by for end in read_ends(folder) if end.start == start and end.why == why.strip()[:MOST_LETTERS]]
        return min((by for by in of_ranks if by.startswith("rank ") and int(by[5:]) < rank), default=None)
    return None


def _why(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, HvdtrainError) else f"{type(error).__name__}: {error}"


def num_starts(folder: Path) -> int:
    path = folder / "starts.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_ends(folder: Path) -> list[End]:
    """The readable lines of ends.jsonl."""
    ends = []
    path = folder / ENDS
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError, TypeError, RecursionError):
            end = End(**json.loads(line))
            if end.status in get_args(Status) and all(isinstance(text, str) for text in (end.why, end.by, end.time)):
                ends.append(end)
    return ends
