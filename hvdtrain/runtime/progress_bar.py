"""A progress bar on the terminal: tqdm's, also on the terminals that Open MPI gives its ranks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

EVERY = 0.2
"""Seconds between two drawings."""

MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")
"""What Open MPI's launcher may be called."""


@contextmanager
def watched(items: Iterable[T], total: int | None, unit: str) -> Iterator[Iterable[T]]:
    """The same items, with a bar that counts them as the caller takes them, if stderr or stdout is a terminal.

    Args:
        total: how many items there are, if that is known.
        unit: what an item is called, for the rate.
    """
    with open_terminal(sys.stderr, sys.stdout) as terminal:
        if terminal is None:
            yield items
            return
        with terminal.bar(items, total=total, unit=unit) as bar:
            yield bar


@contextmanager
def noted(text: str) -> Iterator[None]:
    """Show a line on the terminal inside the `with` block, if there is a terminal."""
    with open_terminal(sys.stderr, sys.stdout) as terminal:
        if terminal is None:
            yield
            return
        with terminal.bar(desc=text, bar_format="{desc}{bar}"):
            yield


@contextmanager
def open_terminal(*streams: IO[str]) -> Iterator[Terminal | None]:
    """The terminal of the first stream that has one, for bars below the lines that Python prints meanwhile; None: no terminal."""
    found = next(((stream, window) for stream in streams if (window := terminal_of(stream)) is not None), None)
    if found is None:
        yield None
        return
    from tqdm import tqdm  # not needed by a program that draws no bar

    tqdm.monitor_interval = 0  # no thread that wakes up a bar: ours are drawn when something happens
    tqdm.set_lock(threading.RLock())  # tqdm's own would be shared among processes; only one process draws
    above = [LinesAbove(stream, found[0]) for stream in (sys.stdout, sys.stderr)]
    with redirect_stdout(above[0]), redirect_stderr(above[1]):
        try:
            yield Terminal(*found)
        finally:
            for stream in above:
                stream.end()


def terminal_of(stream: IO[str]) -> int | None:
    """A file descriptor that knows the width of the terminal that a stream prints to; None if it prints to a file or a pipe.

    Open MPI gives every rank a terminal, and passes on what is printed there to mpirun's own output. Whether that is a
    terminal, and how wide it is now, only mpirun's process knows; the rank's terminal has the size of the start, or none.
    """
    if not stream.isatty():
        return None
    own, parent = stream.fileno(), f"/proc/{os.getppid()}"
    with suppress(OSError):
        if Path(parent, "comm").read_text().startswith(MPIRUN):
            window = os.open(f"{parent}/fd/{own}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            if os.isatty(window) and os.get_terminal_size(window).columns:
                return window
            os.close(window)
    return own if os.get_terminal_size(own).columns else None


class Terminal:
    """A terminal on which bars are drawn.

    Args:
        stream: prints to the terminal.
        window: a file descriptor that knows the terminal's width.
    """

    def __init__(self, stream: IO[str], window: int) -> None:
        self._stream = stream
        self._window = window
        self._columns = 79

    def bar(self, items: Iterable[Any] | None = None, **options: Any) -> Any:
        """A tqdm bar, narrower than the terminal also when its width changes; rates are means. Closing the bar removes it.

        Args:
            items: what the bar is iterated over for, if it is.
            options: tqdm's: desc, total, initial, unit, bar_format.
        """
        from tqdm import tqdm

        bar = tqdm(items, file=self._stream, leave=False, mininterval=EVERY, smoothing=0, ncols=self.columns, **options)
        bar.dynamic_ncols = lambda _: (self.columns, None)  # tqdm's function asks the stream, whose size under mpirun is old
        return bar

    @property
    def columns(self) -> int:
        """How many columns a bar may take. The last one stays empty: a character there makes some terminals wrap."""
        with suppress(OSError):  # a closed terminal has no size
            self._columns = (os.get_terminal_size(self._window).columns or 80) - 1
        return self._columns


class LinesAbove:
    """A stream that prints whole lines above the bars of a terminal.

    Args:
        stream: where the lines go.
        terminal: the stream of the bars.
    """

    def __init__(self, stream: IO[str], terminal: IO[str]) -> None:
        self._stream = stream
        self._terminal = terminal
        self._begun = ""

    def write(self, text: str) -> int:
        """Print the lines that are complete; keep the rest until its line ends."""
        from tqdm import tqdm

        with tqdm.get_lock():
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline:
                with tqdm.external_write_mode(file=self._terminal):
                    self._stream.write(lines + newline)
                    self._stream.flush()
        return len(text)

    def end(self) -> None:
        """Print what is left of a line that was not ended."""
        self._stream.write(self._begun)
        self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
