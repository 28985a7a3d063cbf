"""The state that a training's folder shows: running, ended how, or lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvdtrain.report.ends import ENDS, LAUNCHER, WRITTEN, End, num_starts, read_ends
from hvdtrain.runtime.records import models_of

SILENT = 120.0
"""Seconds without a sign of life after which a training is lost. The lock's heartbeat comes every 10 s, and NFS may show it a
minute later."""

MARGIN = 15.0
"""Seconds after a record of an end in which a heartbeat may still come from the process that has ended."""

StateName = Literal["running", "finished", "stopped", "failed", "lost", "ended"]


@dataclass(frozen=True)
class State:
    """What a training's folder shows about it.

    Attributes:
        name: 'lost': killed, or its host is gone; 'ended': how is not known, as earlier releases did not record it.
        why: the reason for which it ended.
        time: when it ended, as in ends.jsonl.
        by: who recorded that.
        silence: seconds since it last made progress; of a lost one, since its last sign of life.
    """

    name: StateName = "ended"
    why: str = ""
    time: str = ""
    by: str = ""
    silence: float = 0.0

    @property
    def is_bad(self) -> bool:
        """Whether the training ended without having come to an end."""
        return self.name in ("failed", "lost")


def read_state(folder: Path, model: Any, *, is_complete: bool, now: float | None = None) -> State:
    """The state of the training in a folder.

    Args:
        model: the value of the key `model`; None: unknown.
        is_complete: whether it has all its epochs.
        now: the time of day; None: that of the clock.
    """
    now = time.time() if now is None else now
    place = models_of(folder)
    lock = place / f"{Path(model).name}.lock" if isinstance(model, str) else None
    beat = max((_changed(path) for path in ([lock] if lock is not None else place.glob("*.lock"))), default=0.0)
    progress = max(_changed(folder / name) for name in WRITTEN)
    end = _cause([end for end in read_ends(folder) if end.start == num_starts(folder)])
    has_begun_again = end is None or beat > _changed(folder / ENDS) + MARGIN
    if beat and has_begun_again and now - max(beat, progress) < SILENT:
        return State("running", silence=now - progress if progress else 0.0)
    if end is not None:
        return State(end.status, end.why, end.time, end.by)
    if beat:
        return State("lost", silence=now - max(beat, progress))
    return State("finished" if is_complete else "ended")


def _cause(ends: Sequence[End]) -> End | None:
    """Of the records of an end, the last one of those that know most: the launcher sees signals, but not why they were sent."""
    return max(reversed(ends), key=lambda end: 0 if end.is_consequence else 1 if end.by == LAUNCHER else 2, default=None)


def _changed(path: Path) -> float:
    """The time at which a file was changed last; 0: there is none."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
