"""Which gradients travel together."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_BYTES = 2 << 20
"""Gradients of about so many bytes are sent together: large enough for the network, small enough to start early."""


def buckets(kinds: Sequence[tuple[int, object]]) -> list[list[int]]:
    """The parameters' numbers in groups of one type and about BUCKET_BYTES, last parameter first.

    Args:
        kinds: of every parameter in the model's order: bytes and type.

    >>> buckets([(1 << 20, "float32"), (2 << 20, "float32"), (8, "float32"), (8, "float64")])
    [[3], [2], [1], [0]]
    >>> buckets([(8, "float32"), (8, "float32")])
    [[1, 0]]
    """
    groups: list[list[int]] = []
    size = 0
    for number in reversed(range(len(kinds))):
        bytes_here, kind = kinds[number]
        if not groups or size + bytes_here > BUCKET_BYTES or kind != kinds[groups[-1][0]][1]:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += bytes_here
    return groups
