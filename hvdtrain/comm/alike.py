"""Checks that ranks agree on values, such as keys: otherwise they would compute something that no config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError, Problem

SHOWN = 5
"""The most differences that a message shows."""


def check_alike(comm: Communicator, values: Mapping[str, str], *, of: str = "", hint: str, name: str) -> None:
    """Collective. Compare every rank's values with those of rank 0.

    Args:
        values: by name, as text.
        of: a prefix of the names in messages.
        hint: the likely cause.

    Raises:
        ConfigError: on all ranks, with the names that differ and the first rank that differs.
    """
    # Checksums first: the values of all ranks, such as the shapes of a thousand parameters, would fill the memory of each rank.
    checksum = sha256(repr(sorted(values.items())).encode()).digest()
    checksums = comm.gather(checksum, name=name)
    rank = next((rank for rank, other in enumerate(checksums) if other != checksums[0]), None)
    if rank is None:
        return
    found = comm.gather(dict(values) if comm.rank in (0, rank) else {}, name=f"{name}.values")
    first, theirs = found[0], found[rank]
    names = [key for key in dict.fromkeys([*first, *theirs]) if first.get(key) != theirs.get(key)]
    lines = [
        f"{of}{key}: expected the same on all ranks, got {first.get(key, 'nothing')} on rank 0 and "
        f"{theirs.get(key, 'nothing')} on rank {rank}"
        for key in names[:SHOWN]
    ]
    more = f", {len(names) - SHOWN} more differ" if len(names) > SHOWN else ""
    lines[-1] += f"{more} ({hint})"
    raise ConfigError([Problem.of("rank-mismatch", line) for line in lines]).on_all_ranks()
