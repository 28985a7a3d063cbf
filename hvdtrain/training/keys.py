"""The keys of the task forward, and the value of `predict_ranks`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class ForwardKeys(Section):
    """Where the outputs of the tasks forward and search go: into a file, to a callback, or both."""

    output_file: str | None = key(None, "an HDF file for the outputs that forward_step marks; it must not exist yet")
    forward_callback: Any = key(
        None,
        "an object, or a function or class that makes one, with the methods init(*, model), process_seq(*, seq_tag, outputs) "
        "and finish(); called on rank 0, sequence by sequence in the dataset's order; in JSON 'module:name'",
    )


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
    parts = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    placements = []
    for part in parts:
        found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", str(part).strip())
        if found is None or isinstance(part, bool):
            raise ValueError(value)
        placements.append(Placement(int(found[1]), int(found[2]) if found[2] else None))
    if not placements:
        raise ValueError(value)
    return placements
