"""A bar on the terminal that tells how far a long work is, how fast it goes and how long it will take."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hvdtrain.timer import clock_text

T = TypeVar("T")

EVERY = 0.2
"""Seconds between two drawings."""

BAR = 20
"""Characters of the bar."""


def shown(items: Iterable[T], total: int | None) -> Iterator[T]:
    """Pass items on; where stderr is a terminal, draw how many of `total` went by. In the end the line is empty again."""
    if not sys.stderr.isatty():
        yield from items
        return
    drawn = False
    try:
        for done, item in enumerate(items, start=1):
            now = time.monotonic()
            if done == 1:
                began = last = now  # it may have been there already: the rate is that of those behind it
            yield item
            if done > 1 and now - last >= EVERY:
                last, drawn = now, True
                _draw(line(done, total, (done - 1) / (now - began)))
    finally:
        if drawn:
            _draw("")


@contextmanager
def noted(text: str) -> Iterator[None]:
    """Where stderr is a terminal, tell what goes on while it does."""
    if not sys.stderr.isatty():
        yield
        return
    _draw(text)
    try:
        yield
    finally:
        _draw("")


def line(done: int, total: int | None, rate: float) -> str:
    """What is drawn; the rate is sequences a second.

    >>> line(30, 120, 15.0)
    '[#####...............]  25.0%  30 of 120 sequences, 15/s, 0:00:06 remaining'
    >>> line(3, None, 1.5)
    '3 sequences, 1.5/s'
    """
    speed = f"{rate:.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
    if not total:
        return f"{done} sequences, {speed}"
    share = min(1.0, done / total)
    bar = "#" * int(BAR * share) + "." * (BAR - int(BAR * share))
    rest = clock_text(max(0, total - done) / rate)
    return f"[{bar}] {100 * share:5.1f}%  {done} of {total} sequences, {speed}, {rest} remaining"


def _draw(text: str) -> None:
    """Replace the line, which is never longer than the terminal is wide."""
    width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
    sys.stderr.write(f"\r{text[:width]}\x1b[K")  # the sequence clears what is left of a longer line
    sys.stderr.flush()
