"""Sources of users' classes, to convert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any

from hvdtrain.data.dataset import Item, SequenceSource
from hvdtrain.errors import DataError


def as_source(where: str, opened: Any, convert: Callable[[int, Any], Item]) -> SequenceSource:
    """What a config's class or function returned, as a source to convert. Raises: DataError, if it cannot be iterated over.

    Args:
        where: the config key, for messages.
        convert: makes a sequence of an item that is not (tag, {data key: array}), given its number. Raises: DataError.
    """
    if isinstance(opened, SequenceSource):
        return opened
    if not hasattr(opened, "__iter__"):
        raise DataError(f"{where}: expected something that yields (tag, {{key: array}}), got {type(opened).__name__}")
    return ForeignSource(opened, convert)


class ForeignSource(SequenceSource):
    """Any iterable of (tag, {data key: array}), where arrays may be text, or of other items that can be converted; it may have
    `labels`, `dims` and `__len__`.
    """

    def __init__(self, inner: Iterable[Any], convert: Callable[[int, Any], Item]) -> None:
        self._inner = inner
        self._convert = convert
        self.labels = {name: list(labels) for name, labels in dict(getattr(inner, "labels", {})).items()}
        self.dims = dict(getattr(inner, "dims", {}))

    @property
    def name(self) -> str:
        return type(self._inner).__name__

    def begin_epoch(self, epoch: int) -> int | None:
        if epoch != 1:
            raise DataError(f"--epoch: expected 1 for {self.name}, which has no epochs, got {epoch}")
        return len(self._inner) if isinstance(self._inner, Sized) else None

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        inner = self._inner
        if isinstance(inner, Sequence):  # looked up by number
            numbers = range(start, len(inner) if stop is None else min(stop, len(inner)))
            items: Iterator[Any] = (inner[number] for number in numbers)
        else:
            items = islice(inner, start, stop)
        for number, item in enumerate(items, start=start):
            is_sequence = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict)
            yield item if is_sequence else self._convert(number, item)
