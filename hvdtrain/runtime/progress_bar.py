"""A line on the terminal that tells how far a long work is, how fast it goes and how long it will take."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import IO, Any, TypeVar

from hvdtrain.runtime.timer import clock_text

T = TypeVar("T")

EVERY = 0.2
"""Seconds between two drawings."""

BAR = 20
"""Characters of the bar."""


class Line:
    """The last line of a terminal, drawn again and again. It is never longer than the terminal is wide.

    Args:
        stream: prints to the terminal.
        window: a file descriptor that knows how wide the terminal is.
    """

    def __init__(self, stream: IO[str], window: int) -> None:
        self._stream = stream
        self._window = window
        self._drawn = False

    def draw(self, text: str) -> None:
        """Replace the line."""
        with suppress(OSError):  # nobody stops working because a terminal was closed
            width = os.get_terminal_size(self._window).columns - 1
            self._stream.write(f"\r{text[:width]}\x1b[K")  # the sequence clears what is left of a longer line
            self._stream.flush()
        self._drawn = bool(text)

    def clear(self) -> None:
        """Leave the line empty, if it is not."""
        if self._drawn:
            self.draw("")


class Above:
    """A stream that clears a terminal's last line before it prints, so that what is printed stands above it."""

    def __init__(self, stream: IO[str], line: Line) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        self._line.clear()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def line_below() -> Iterator[Line | None]:
    """A line below everything that Python prints meanwhile to stdout or stderr; in the end it is empty. None: no terminal."""
    window = terminal_of(sys.stdout)
    if window is None:
        yield None
        return
    line = Line(sys.stdout, window)
    with redirect_stdout(Above(sys.stdout, line)), redirect_stderr(Above(sys.stderr, line)):
        try:
            yield line
        finally:
            line.clear()


def terminal_of(stream: IO[str]) -> int | None:
    """A file descriptor of the terminal that a stream prints to; None where that is a file or a pipe.

    Open MPI gives every rank a terminal of its own, without a size, and passes on what is printed there to wherever its own
    output goes: what that is, only its process knows.
    """
    if not stream.isatty():
        return None
    if os.get_terminal_size(stream.fileno()).columns:
        return stream.fileno()
    try:
        of_launcher = os.open(f"/proc/{os.getppid()}/fd/{stream.fileno()}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    if os.isatty(of_launcher) and os.get_terminal_size(of_launcher).columns:
        return of_launcher
    os.close(of_launcher)
    return None


def shown(items: Iterable[T], total: int | None) -> Iterator[T]:
    """Pass items on; where stderr is a terminal, draw how many of `total` went by. In the end the line is empty again."""
    if not sys.stderr.isatty():
        yield from items
        return
    line = Line(sys.stderr, sys.stderr.fileno())
    try:
        for done, item in enumerate(items, start=1):
            now = time.monotonic()
            if done == 1:
                began = last = now  # it may have been there already: the rate is that of those behind it
            yield item
            if done > 1 and now - last >= EVERY:
                last = now
                line.draw(items_line(done, total, (done - 1) / (now - began)))
    finally:
        line.clear()


@contextmanager
def noted(text: str) -> Iterator[None]:
    """Where stderr is a terminal, tell what goes on while it does."""
    if not sys.stderr.isatty():
        yield
        return
    line = Line(sys.stderr, sys.stderr.fileno())
    line.draw(text)
    try:
        yield
    finally:
        line.clear()


def items_line(done: int, total: int | None, rate: float) -> str:
    """What is drawn for items that go by; the rate is sequences a second.

    >>> items_line(30, 120, 15.0)
    '[#####...............]  25.0%  30 of 120 sequences, 15/s, 0:00:06 remaining'
    >>> items_line(3, None, 1.5)
    '3 sequences, 1.5/s'
    """
    speed = f"{rate:.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
    if not total:
        return f"{done} sequences, {speed}"
    rest = clock_text(max(0, total - done) / rate)
    return f"{bar(done / total)}  {done} of {total} sequences, {speed}, {rest} remaining"


def bar(share: float) -> str:
    """How much of something is done, from 0 to 1.

    >>> bar(0.25)
    '[#####...............]  25.0%'
    """
    share = min(1.0, share)
    return f"[{'#' * int(BAR * share)}{'.' * (BAR - int(BAR * share))}] {100 * share:5.1f}%"
