"""Which rank the others wait for, by the heartbeats of all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.plugins.watchdog.relays import ranges_text, ranks_in

SECONDS_FOR_LAUNCHERS = 3.0
"""How long a rank keeps waiting for one that has ended. Most launchers and transports end it sooner; srun with MPI does not."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank regularly reports.

    Attributes:
        activity: what the rank is doing.
        idle: seconds since it last made progress.
        beats: how often it has made progress.
        waits: whether it is waiting for other ranks.
        overdue: whether it has made no progress for longer than its watchdog allows.
    """

    activity: str
    idle: float
    beats: int
    waits: bool
    overdue: bool


@dataclass(frozen=True)
class Diagnosis:
    """Why the job makes no progress.

    Attributes:
        hanging: the ranks that are waiting for no other one.
        silent: the ranks that have stopped sending heartbeats.
        gone: the ranks that have ended, or whose hosts are lost, while others wait for them.
        ends: the job ends now, without waiting for any rank to recover.
    """

    hanging: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    ends: bool = False

    def as_json(self) -> list[Any]:
        """It, as texts and a number."""
        return [*map(ranges_text, (self.hanging, self.silent, self.gone)), self.ends]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Diagnosis:
        hanging, silent, gone, ends = values
        return cls(ranks_in(hanging), ranks_in(silent), ranks_in(gone), ends)


def values(heartbeat: Heartbeat | None) -> list[Any]:
    return [] if heartbeat is None else list(vars(heartbeat).values())


def has_waited_long(heartbeat: Heartbeat) -> bool:
    """Whether a rank has waited for others for so long that, if one of them has ended, it will not continue."""
    return heartbeat.waits and heartbeat.idle > SECONDS_FOR_LAUNCHERS


def diagnose(heartbeats: Mapping[int, Heartbeat], silent: Collection[int], gone: Collection[int] = ()) -> Diagnosis | None:
    """Find the ranks that hang; None: no rank is overdue, and none is waiting for one that has ended.

    Blame ranks that have ended first, then silent ones, then those that are waiting for no other rank. Of the last, blame the
    ones furthest behind, as GPUs let a rank run ahead of a collective. If all ranks are waiting, any of them may hang.

    Args:
        heartbeats: by rank.
        silent: the ranks whose heartbeat is old.
        gone: the ranks that have ended, or whose hosts are lost.

    >>> waits, works = Heartbeat("step 5", 20.0, 6, True, True), Heartbeat("step 5", 20.0, 6, False, False)
    >>> diagnose({0: waits, 1: works, 2: waits}, ()), diagnose({0: waits, 1: waits}, {1})
    (Diagnosis(hanging=(1,), silent=(), gone=(), ends=False), Diagnosis(hanging=(), silent=(1,), gone=(), ends=False))
    >>> diagnose({0: waits, 1: works}, (), {2}), diagnose({0: works, 1: works}, (), {2}) is None
    (Diagnosis(hanging=(), silent=(), gone=(2,), ends=True), True)
    """
    if gone and any(has_waited_long(heartbeat) for rank, heartbeat in heartbeats.items() if rank not in gone):
        return Diagnosis(gone=tuple(sorted(gone)), ends=True)
    recent = {rank: heartbeat for rank, heartbeat in heartbeats.items() if rank not in silent}
    idle_of_overdue = [heartbeat.idle for heartbeat in recent.values() if heartbeat.overdue]
    if not idle_of_overdue:
        return None
    if silent:
        return Diagnosis(silent=tuple(sorted(silent)))
    longest = max(idle_of_overdue)
    working = {rank: heartbeat for rank, heartbeat in recent.items() if not heartbeat.waits and heartbeat.idle > longest / 2}
    fewest = min((heartbeat.beats for heartbeat in working.values()), default=0)
    hanging = [rank for rank, heartbeat in sorted(working.items()) if heartbeat.beats == fewest]
    return Diagnosis(tuple(hanging) or tuple(sorted(recent)))
