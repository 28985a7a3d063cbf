"""Which rank's watchdog sends its heartbeats to which other one, and what a relay reports about the ranks behind it.

In a job of up to DIRECT ranks, all send theirs to rank 0. In a larger one, the ranks are in groups, and the first rank of each
group, its relay, tells rank 0 about all of them. So no rank hears from more than twice the square root of all ranks. While all
is well, a relay sends the same few bytes however many ranks are behind it; it sends their heartbeats when one of them is
overdue or has ended, and when rank 0 asks because a rank elsewhere is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

DIRECT = 200
"""The most ranks that send their heartbeats to rank 0 without a relay."""


RANKS_OF_HOST = 8
"""Groups are multiples of this number, so that the ranks of a host are in the same one."""


@dataclass(frozen=True)
class Layout:
    """Who sends heartbeats to whom.

    Attributes:
        size: the number of ranks.
        group: the ranks from each multiple of this number on are a group.

    >>> small, large = Layout.of(100), Layout.of(1024)
    >>> small.hub_of(99), large.hub_of(99), large.hub_of(96), large.hub_of(31), large.most_senders
    (0, 96, 0, 0, 62)
    """

    size: int
    group: int

    @classmethod
    def of(cls, size: int) -> Layout:
        """That of a job of this size."""
        if size <= DIRECT:
            return cls(size, size)
        root = math.isqrt(size - 1) + 1
        return cls(size, -(-root // RANKS_OF_HOST) * RANKS_OF_HOST)

    def hub_of(self, rank: int) -> int:
        """The rank to which a rank sends its heartbeats; of rank 0, itself."""
        return rank - rank % self.group if rank % self.group else 0

    def is_hub(self, rank: int) -> bool:
        """Whether other ranks send their heartbeats to this one."""
        return rank % self.group == 0

    def senders(self, hub: int) -> list[int]:
        """The ranks that send their heartbeats to a hub."""
        ranks = list(range(hub + 1, min(hub + self.group, self.size)))
        return ranks if hub else ranks + list(range(self.group, self.size, self.group))

    @property
    def has_relays(self) -> bool:
        """Whether not all ranks send theirs to rank 0."""
        return self.group < self.size

    @property
    def most_senders(self) -> int:
        """The number of ranks that rank 0 hears from, which is the largest one of a rank."""
        return min(self.group, self.size) - 1 + (self.size - 1) // self.group


@dataclass(frozen=True)
class GroupReport:
    """What a relay tells rank 0 about the ranks that send their heartbeats to it.

    Attributes:
        gone: the ranks that have ended because of an error, or were killed.
        ended: those that have ended in an orderly way.
        lost: those whose hosts do not answer.
        silent: those that are silent.
        overdue: whether a rank is overdue.
        members: for each rank that was heard, its number, the seconds since its last heartbeat, and the fields of that; None:
            all is well, and rank 0 has not asked.
    """

    gone: Sequence[int] = ()
    ended: Sequence[int] = ()
    lost: Sequence[int] = ()
    silent: Sequence[int] = ()
    overdue: bool = False
    members: Sequence[Sequence[Any]] | None = None

    @property
    def is_trouble(self) -> bool:
        """Whether rank 0 has to look for the reason."""
        return bool(self.overdue or self.gone or self.lost)

    def as_json(self) -> list[Any]:
        """It, as lists, numbers and texts."""
        ranks = [ranges_text(some) for some in (self.gone, self.ended, self.lost, self.silent)]
        return [*ranks, self.overdue, self.members]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> GroupReport:
        gone, ended, lost, silent, overdue, members = values
        return cls(ranks_in(gone), ranks_in(ended), ranks_in(lost), ranks_in(silent), overdue, members)


def ranges_text(ranks: Collection[int]) -> str:
    """Ranks as text that is short even if there are thousands, as a datagram has at most 64 KB.

    >>> ranges_text([7, 0, 1, 2, 9])
    '0-2,7,9'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def ranks_in(text: str) -> tuple[int, ...]:
    """The ranks of `ranges_text`.

    >>> ranks_in("0-2,7"), ranks_in("")
    ((0, 1, 2, 7), ())
    """
    ends = (span.partition("-") for span in text.split(",") if span)
    return tuple(rank for first, _, last in ends for rank in range(int(first), int(last or first) + 1))
