"""Whether something is the same on all ranks: where it is not, they would compute something that no config says."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError, Problem

SHOWN = 5
"""So many differences are in the message."""


def check_alike(comm: Communicator, values: Mapping[str, str], *, of: str = "", hint: str, name: str) -> None:
    """Collective. Compare every rank's values with those of rank 0.

    Args:
        values: by name, as text.
        of: what precedes a name in the message.
        hint: what the cause may be.

    Raises:
        ConfigError: on all ranks, with the names that differ and the first rank that differs.
    """
    first, *others = comm.gather(dict(values), name=name)
    for rank, theirs in enumerate(others, 1):
        names = [each for each in dict.fromkeys([*first, *theirs]) if first.get(each) != theirs.get(each)]
        if names:
            lines = [
                f"{of}{each}: expected the same on all ranks, got {first.get(each, 'nothing')} on rank 0 and "
                f"{theirs.get(each, 'nothing')} on rank {rank}"
                for each in names[:SHOWN]
            ]
            more = f", {len(names) - SHOWN} more differ" if len(names) > SHOWN else ""
            lines[-1] += f"{more} ({hint})"
            raise ConfigError([Problem.of("rank-mismatch", line) for line in lines]).on_all_ranks()
