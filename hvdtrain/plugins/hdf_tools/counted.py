"""A count of what is written, for somebody who waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hvdtrain.runtime.bars import bars

T = TypeVar("T")


@contextmanager
def counted(items: Iterable[T], total: int | None, unit: str) -> Iterator[Iterator[T]]:
    """The same items, which are counted as the caller takes them. The arguments are those of `Bars.count`."""

    def each(count: Callable[[int], object]) -> Iterator[T]:
        for item in items:
            yield item
            count(1)

    with bars().count("", total, unit) as count:
        yield each(count)
