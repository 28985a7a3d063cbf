"""Sequences stay in memory once they are read (`cache_size`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Rule, Section, key, parsed_by
from hvdtrain.config.plugins import Plugin
from hvdtrain.data.files import parse_size


def parse_sizes(value: int | str | Sequence[int | str]) -> list[int | None]:
    """Budgets in bytes for train, dev and eval (0: none, None: unlimited). Raises: ValueError.

    >>> parse_sizes("2G"), parse_sizes([0, "1M"]), parse_sizes("-1,1K,0")
    ([2147483648, 0, 0], [0, 1048576, 0], [None, 1024, 0])
    """
    values: list[Any] = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else list(value)
    if len(values) > 3:
        raise ValueError(value)
    sizes = [parse_size(size) for size in values]
    return sizes + [0] * (3 - len(sizes))


@dataclass(frozen=True, kw_only=True)
class CacheKeys(Section):
    """Sequences that stay in memory."""

    cache_size: int | str | list[int | str] = key(
        0,
        "memory in which a rank keeps sequences of train, dev, eval that it has read (one size or up to three): 0 none, '2G' a "
        "budget with K, M or G, -1 everything; memory-mapped files need none",
        Rule("sizes such as 0, '512M', -1, or up to three of them", parsed_by(parse_sizes)),
    )


PLUGIN = Plugin(caches={"memory": f"{__name__}.budget:caches_of"}, keys={"cache": CacheKeys})
