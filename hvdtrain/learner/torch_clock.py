"""How long the device works on training steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MANY = 1000
"""Spans that wait for their events before some of them are read."""


class CudaClock:
    """Seconds from the first to the last kernel of each span, by events on the device: no step waits for it."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def span(self) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pairs.append((begin, end))
        if len(self._pairs) > MANY and self._pairs[MANY // 2][1].query():  # type: ignore[no-untyped-call]
            self._add(MANY // 2)

    def take(self) -> float:
        torch.cuda.synchronize()
        self._add(len(self._pairs))
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _add(self, count: int) -> None:
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._pairs[:count]) / 1000
        del self._pairs[:count]
