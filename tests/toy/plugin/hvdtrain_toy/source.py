"""A source: data to convert, which is read from beginning to end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy

from hvdtrain.data.dataset import Item, SequenceSource


class Ramp(SequenceSource):
    """Sequences of 1, 2, 3, ... numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def begin_epoch(self, epoch: int) -> int:
        return self._count

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        for number in range(start, self._count if stop is None else stop):
            yield f"seq-{number}", {"data": numpy.arange(number + 1, dtype=numpy.float32)[:, None]}
