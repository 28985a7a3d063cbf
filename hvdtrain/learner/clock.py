"""How long training steps take on a device that has finished when a call returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.timer import Timer


class CpuClock:
    """Seconds inside of spans."""

    def __init__(self) -> None:
        self._timer = Timer()

    @contextmanager
    def span(self) -> Iterator[None]:
        with self._timer.span("step"):
            yield

    def take(self) -> float:
        return self._timer.take().get("step", 0.0)
