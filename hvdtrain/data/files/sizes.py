"""Parsing and formatting sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_sizes(value: int | str | Sequence[int | str]) -> list[int | None]:
    """Budgets in bytes for train, dev and eval (0: none, None: unlimited). Raises: ValueError.

    >>> parse_sizes("2G"), parse_sizes([0, "1M"]), parse_sizes("-1,1K,0")
    ([2147483648, 0, 0], [0, 1048576, 0], [None, 1024, 0])
    """
    parts: list[Any] = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else list(value)
    if len(parts) > 3:
        raise ValueError(value)
    sizes = [parse_size(part) for part in parts]
    return sizes + [0] * (3 - len(sizes))


def parse_size(value: int | str) -> int | None:
    """A size in bytes; None (no limit) if it is negative. Raises: ValueError.

    >>> parse_size("1.5k"), parse_size(7), parse_size("-1")
    (1536, 7, None)
    """
    text = str(value).strip()
    unit = UNITS.get(text[-1:].upper(), 1)
    size = float(text[:-1] if unit > 1 else text)
    if size in (float("inf"), float("-inf")):
        raise ValueError(value)
    return None if size < 0 else int(size * unit)


def size_text(size: int) -> str:
    """A number of bytes as text.

    >>> size_text(5 << 30), size_text(3_456_789), size_text(10_000)
    ('5.0 GB', '3.3 MB', '9.8 KB')
    """
    for unit, one in reversed(UNITS.items()):
        if size >= one:
            return f"{size / one:.1f} {unit}B"
    return f"{size} bytes"
