"""The keys of trials, and the values of `predict_ranks`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Rule, Section, key, parsed_by


@dataclass(frozen=True)
class Placement:
    """A number of ranks, and how many of them are on each host; None: as many as in the measurement."""

    ranks: int
    per_host: int | None = None

    def __str__(self) -> str:
        return str(self.ranks) if self.per_host is None else f"{self.ranks}:{self.per_host}"


def parse_placements(value: Any) -> list[Placement]:
    """Parse the key `predict_ranks`: 8, (2, 8), '2,8,64:4' (64 ranks, 4 on each host). Raises: ValueError, TypeError.

    >>> [str(placement) for placement in parse_placements("2, 8,64:4")], parse_placements((2, 8)) == parse_placements("2,8")
    (['2', '8', '64:4'], True)
    """
    entries = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    placements = []
    for entry in entries:
        match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", str(entry).strip())
        if match is None or isinstance(entry, bool):
            raise ValueError(value)
        placements.append(Placement(int(match[1]), int(match[2]) if match[2] else None))
    if not placements:
        raise ValueError(value)
    return placements


def _is_ramp(value: list[float]) -> bool:
    if len(value) != 3:
        return False
    lowest, highest, updates = value
    return 0 < lowest < highest and updates >= 20 and updates == int(updates)


@dataclass(frozen=True, kw_only=True)
class TrialKeys(Section):
    """Trying a config."""

    predict_ranks: int | str | tuple[Any, ...] | list[Any] | None = key(
        None,
        "numbers of ranks for which --dry-run predicts the speed, such as '2,8,64:4' (64 ranks, 4 on each host; else as many as "
        "there are on each now)",
        Rule("numbers of ranks such as 8, '2,8,64', or RANKS:RANKS_PER_HOST", parsed_by(parse_placements)),
    )
    learning_rate_ramp: list[float] = key(
        [1e-6, 1.0, 100],
        "the lowest and the highest rate that --find-learning-rate tries, and the number of updates between them",
        Rule("three numbers: a positive rate, a higher one, and at least 20 updates", _is_ramp),
    )
