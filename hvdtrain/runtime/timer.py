"""Wall-clock time: seconds by name, the clock of training steps on a CPU, and seconds as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")


class Timer:
    """Accumulates wall-clock seconds by name. Spans may nest: every second is counted once, in the innermost span.

    >>> now = iter([0.0, 1.0, 3.0, 10.0])
    >>> timer = Timer(clock=lambda: next(now))
    >>> with timer.span("compute"):           # from 0 to 10 ...
    ...     with timer.span("communication"):  # ... of which 1 to 3 are counted here
    ...         pass
    >>> timer.seconds
    {'compute': 8.0, 'communication': 2.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.ranges: Callable[[str], AbstractContextManager[Any]] | None = None  # a profiler's, around every span
        self._before: dict[str, float] = {}
        self._spans: dict[str, _Span] = {}
        self._open: list[str] = []
        self._since = 0.0

    def span(self, name: str) -> AbstractContextManager[None]:
        """Count the seconds of the `with` block under `name`."""
        span = self._spans.get(name)
        if span is None:
            span = self._spans[name] = _Span(self, name)
        return span

    def waits(self, name: str, values: Iterable[T]) -> Iterator[T]:
        """Yield `values`, and count the seconds spent waiting for each of them under `name`."""
        iterator = iter(values)
        end = object()
        while True:
            with self.span(name):
                value = next(iterator, end)
            if value is end:
                return
            yield value  # type: ignore[misc]  # mypy cannot tell that this is not the sentinel

    def book(self, name: str, seconds: float) -> None:
        """Move seconds from the open span to `name`: time that was measured elsewhere, such as within a TensorFlow graph.

        >>> now = iter([0.0, 10.0])
        >>> timer = Timer(clock=lambda: next(now))
        >>> with timer.span("compute"):
        ...     timer.book("communication", 4.0)
        >>> timer.seconds
        {'compute': 6.0, 'communication': 4.0}
        """
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) - seconds
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last call, and reset them."""
        seconds, self.seconds = self.seconds, {}
        self._before = _added(self._before, seconds)
        return seconds

    def total(self) -> dict[str, float]:
        """All seconds by name so far, taken or not."""
        return _added(self._before, self.seconds)

    def _count(self) -> None:
        """Count the time since the last call under the innermost open name."""
        now = self.clock()
        if self._open:
            name = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


class _Span(AbstractContextManager[None]):
    """The spans of a timer with one name, which may be within each other. (Not a generator with `contextmanager`, which takes
    several times as long: a step has some of them.)"""

    def __init__(self, timer: Timer, name: str) -> None:
        self._timer = timer
        self._name = name
        self._ranges: list[AbstractContextManager[Any]] = []  # those that are open, if a profiler runs

    def __enter__(self) -> None:
        timer = self._timer
        if timer.ranges is not None:
            self._ranges.append(timer.ranges(self._name))
            self._ranges[-1].__enter__()
        timer._count()
        timer._open.append(self._name)

    def __exit__(self, *error: Any) -> None:
        self._timer._count()
        self._timer._open.pop()
        if self._ranges:
            self._ranges.pop().__exit__(*error)


def _added(seconds: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds.get(name, 0.0) + more.get(name, 0.0) for name in {**seconds, **more}}


class CpuClock(AbstractContextManager[None]):
    """Accumulates the wall-clock seconds within its spans, which are not within each other."""

    def __init__(self) -> None:
        self._seconds = self._before = self._began = 0.0

    def span(self) -> AbstractContextManager[None]:
        return self

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        self._before += seconds
        return seconds

    def known_seconds(self) -> float:
        """All seconds so far, without those of an open span."""
        return self._before + self._seconds


def clock_text(seconds: float) -> str:
    """Format seconds as h:mm:ss, with hours that are not wrapped into days.

    >>> clock_text(1738.4)
    '0:28:58'
    """
    whole_seconds = int(seconds)
    return f"{whole_seconds // 3600}:{whole_seconds // 60 % 60:02d}:{whole_seconds % 60:02d}"


def duration_text(seconds: float) -> str:
    """Format seconds as h:mm:ss, or with a fraction if there are few.

    >>> duration_text(91.2), duration_text(0.4123)
    ('0:01:31', '0.41 s')
    """
    return f"{seconds:.2g} s" if seconds < 9.95 else clock_text(seconds)
