"""Which gradients are sent in one message."""

from __future__ import annotations

from collections.abc import Sequence


def buckets(kinds: Sequence[tuple[int, object]], num_bytes: int) -> list[list[int]]:
    """The parameters' numbers in groups, each to be sent in one message; last parameter first.

    A group has one type and ends with the parameter that brings it to `num_bytes`, so that a small parameter (a bias) shares a
    message with a large one (its layer's weight).

    Args:
        kinds: the size in bytes and the type of each parameter, in the model's order.
        num_bytes: large enough for the bandwidth of the transport, small enough to start early.

    >>> buckets([(900, "float32"), (8, "float32"), (1200, "float32"), (8, "float32"), (8, "float64")], 1000)
    [[4], [3, 2], [1, 0]]
    >>> buckets([(8, "float32"), (8, "float32")], 1000)
    [[1, 0]]
    """
    groups: list[list[int]] = []
    missing = 0
    for number in reversed(range(len(kinds))):
        size, kind = kinds[number]
        if missing <= 0 or kind != kinds[groups[-1][0]][1]:
            groups.append([])
            missing = num_bytes
        groups[-1].append(number)
        missing -= size
    return groups
