"""The seconds of the ranks in an epoch, and the rank that the others waited for: lines of the log, and what pages show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from hvdtrain.report.epoch import FEW_RANKS, EpochReport
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime import log

if TYPE_CHECKING:
    from hvdtrain.report.starts import Start
    from hvdtrain.settings import Settings
    from hvdtrain.training.session import Session


class SlowRanks:
    """Logs the seconds of the ranks after every epoch, and warns of a rank that held the others up."""

    def epoch(self, report: EpochReport) -> None:
        for level, line in log_lines(report):
            log.write(level, line)


def log_lines(report: EpochReport) -> list[tuple[int, str]]:
    """Lines about the ranks' seconds, each with the lowest verbosity that shows it."""
    start = f"train epoch {report.epoch}"
    lines = [(5, f"{start}, seconds: {row}") for row in seconds_lines(report.seconds)]
    late = straggler_line(report.seconds)
    return lines + ([(2, f"{start}: {late}")] if late else [])


@contextmanager
def open_slow_ranks(settings: Settings, session: Session, start: Start) -> Iterator[Reporters]:
    yield Reporters([SlowRanks()])


def seconds_lines(seconds: Sequence[Mapping[str, float]]) -> list[str]:
    """The ranks' seconds by activity: one line per rank if there are few, else the median and the slowest rank.

    >>> seconds_lines([{"compute": 8.25, "rest": 1}, {"compute": 7, "rest": 2.25}])
    ['rank 0: compute 8.2, rest 1.0', 'rank 1: compute 7.0, rest 2.2']
    >>> for line in seconds_lines([{"data wait": 0.1, "compute": 8.0}] * 99 + [{"data wait": 3.0, "compute": 8.1}]):
    ...     print(line)
    median of 100 ranks: data wait 0.1, compute 8.0
    slowest, rank 99: data wait 3.0, compute 8.1; waiting for data took 2.9 s longer than usual
    """
    if len(seconds) <= FEW_RANKS:
        return [f"rank {number}: {_seconds_text(rank)}" for number, rank in enumerate(seconds)]
    usual = _medians(seconds)
    slowest = _slowest(seconds)
    cause = _cause(seconds[slowest], usual)
    longer = seconds[slowest].get(cause, 0.0) - usual.get(cause, 0.0)
    return [
        f"median of {len(seconds)} ranks: {_seconds_text(usual)}",
        f"slowest, rank {slowest}: {_seconds_text(seconds[slowest])}; {OWN_WORK[cause]} took {longer:.1f} s longer than usual",
    ]


def _seconds_text(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05) or "0.0 in all"


def _medians(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for rank in seconds for name in rank)
    return {name: median(rank.get(name, 0.0) for rank in seconds) for name in names}


def _slowest(seconds: Sequence[Mapping[str, float]]) -> int:
    return max(range(len(seconds)), key=lambda rank: own_seconds(seconds[rank]))


def _without(seconds: Sequence[Mapping[str, float]], left_out: int) -> list[Mapping[str, float]]:
    return [rank for number, rank in enumerate(seconds) if number != left_out]


def _cause(times: Mapping[str, float], usual: Mapping[str, float]) -> str:
    """The rank's own work that took longer than usual by most."""
    return max(OWN_WORK, key=lambda name: times.get(name, 0.0) - usual.get(name, 0.0))


OWN_WORK = {"data wait": "waiting for data", "compute": "computing"}
"""Activities of a rank in a training step that involve no other rank, with their names in the log."""

COLLECTIVES = ("communication", "parameter sync")
"""Activities in which a rank waits for the others."""

MIN_SHARE = 0.15
"""A rank is reported if it takes longer than the others by this share. Random batch lengths explain smaller differences."""

MIN_SECONDS = 0.2
"""It also has to take this many seconds longer: the times of a short epoch are mostly noise."""


def straggler_line(seconds: Sequence[Mapping[str, float]]) -> str | None:
    """A line about the slowest rank: how long the others waited for it, and whether reading data or computing is the cause.

    Args:
        seconds: for every rank, seconds of an epoch by activity.

    Returns:
        None if no rank held up the others.

    >>> straggler_line([{"compute": 8.0, "communication": 3.1}, {"compute": 11.0, "communication": 0.1}])
    'rank 1 held the others up by 3.0 s (38%): computing took 11.0 s, against 8.0 s'
    >>> straggler_line([{"compute": 8.0, "communication": 0.2}, {"compute": 8.3, "communication": 0.1}])
    """
    slowest = straggler(seconds)
    if slowest is None:
        return None
    typical = _medians(_without(seconds, slowest.rank))
    times = seconds[slowest.rank]
    cause = _cause(times, typical)
    return (
        f"rank {slowest.rank} held the others up by {slowest.late:.1f} s ({slowest.share:.0%}): {OWN_WORK[cause]} took "
        f"{times.get(cause, 0.0):.1f} s, against {typical.get(cause, 0.0):.1f} s"
    )


@dataclass(frozen=True)
class Straggler:
    """A rank that held up the others.

    Attributes:
        late: seconds that it took longer than the median of the others.
        share: the same as a share of their time.
    """

    rank: int
    late: float
    share: float


def straggler(seconds: Sequence[Mapping[str, float]]) -> Straggler | None:
    """The rank that held up the others in an epoch, if any. The argument is that of `straggler_line`."""
    if len(seconds) < 2:
        return None
    slowest = _slowest(seconds)
    others = _without(seconds, slowest)
    usual = median(map(own_seconds, others))
    late = own_seconds(seconds[slowest]) - usual
    # The slowest rank arrives last, so it hardly waits itself: only if the others waited for it, it is the cause.
    waited = median(_waiting(rank) for rank in others) - _waiting(seconds[slowest])
    if late < MIN_SECONDS or late < MIN_SHARE * usual or waited < late / 2:
        return None
    return Straggler(slowest, late, late / usual if usual else 0.0)


def own_seconds(rank: Mapping[str, float]) -> float:
    """Seconds that a rank spent on its own work: computing and waiting for data."""
    return sum(rank.get(name, 0.0) for name in OWN_WORK)


def _waiting(rank: Mapping[str, float]) -> float:
    return sum(rank.get(name, 0.0) for name in COLLECTIVES)
