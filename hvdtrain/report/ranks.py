"""Who held whom up: where the ranks' time went in an epoch, side by side.

A rank that waits inside a collective is the symptom of another rank's slowness. So what counts against a rank is only what it
does for itself, reading and computing, and the others have to have waited for it in fact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

OWN = {"data wait": "waiting for data", "compute": "computing"}
"""What a rank does for itself in a training step, and how it is told."""

WAITING = ("communication", "parameter sync")
"""Where a rank waits for the others."""

SHARE = 0.15
"""A rank is named from so much more time than the others' on: below, batches of chance lengths make as much."""

SECONDS = 0.2
"""And from so many seconds on: a short epoch says nothing."""


def held_up(seconds: Sequence[Mapping[str, float]]) -> str | None:
    """Which rank held the others up, by how much, and whether data or computing is the cause; None where none did.

    Args:
        seconds: by rank, seconds of an epoch under each name.

    >>> held_up([{"compute": 8.0, "communication": 3.1}, {"compute": 11.0, "communication": 0.1}])
    'rank 1 held the others up by 3.0 s (38%): computing took 11.0 s, against 8.0 s'
    >>> held_up([{"compute": 8.0, "communication": 0.2}, {"compute": 8.3, "communication": 0.1}])
    """
    if len(seconds) < 2:
        return None
    own = [sum(rank.get(name, 0.0) for name in OWN) for rank in seconds]
    slowest = max(range(len(own)), key=own.__getitem__)
    others = [rank for number, rank in enumerate(seconds) if number != slowest]
    usual = median(time for number, time in enumerate(own) if number != slowest)
    late = own[slowest] - usual
    waited = median(_waiting(rank) for rank in others) - _waiting(seconds[slowest])
    if late < SECONDS or late < SHARE * usual or waited < late / 2:
        return None
    typical = {name: median(rank.get(name, 0.0) for rank in others) for name in OWN}
    cause = max(OWN, key=lambda name: seconds[slowest].get(name, 0.0) - typical[name])
    return (
        f"rank {slowest} held the others up by {late:.1f} s ({late / usual:.0%}): {OWN[cause]} took "
        f"{seconds[slowest].get(cause, 0.0):.1f} s, against {typical[cause]:.1f} s"
    )


def table(seconds: Sequence[Mapping[str, float]]) -> list[str]:
    """The ranks' seconds under each name, a rank a row.

    >>> table([{"compute": 8.25, "rest": 1}, {"compute": 7, "rest": 2.25}])
    ['rank 0: compute 8.2, rest 1.0', 'rank 1: compute 7.0, rest 2.2']
    """
    rows = [", ".join(f"{name} {value:.1f}" for name, value in rank.items()) for rank in seconds]
    return [f"rank {number}: {row}" for number, row in enumerate(rows)]


def _waiting(rank: Mapping[str, float]) -> float:
    return sum(rank.get(name, 0.0) for name in WAITING)
