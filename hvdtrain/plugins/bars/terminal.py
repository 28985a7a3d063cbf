"""Progress bars on terminals: tqdm's, also on the terminals that Open MPI gives its ranks. Log lines, like everything else that
Python prints meanwhile, appear above them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any

from hvdtrain.runtime.bars import EVERY
from hvdtrain.runtime.terminal import Window, terminal_of

SHARE = "SHARE"
BAR = "{desc}: SHARE|{bar:10}{r_bar}"
"""tqdm's default format, but with a bar of a fixed width, as the losses after it would change the width with every update. SHARE
stands for the share that is done, as in lines about steps: tqdm would take the number of steps, which are not equally large."""

NARROW = "{desc}: SHARE {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
WIDE = 100
"""NARROW is the format in a terminal with fewer columns than WIDE."""


@contextmanager
def open_terminal(*streams: IO[str]) -> Iterator[Terminal | None]:
    """The terminal of the first stream that has one, for bars below the lines that Python prints meanwhile; None: no terminal."""
    terminal = next(((stream, window) for stream in streams if (window := terminal_of(stream)) is not None), None)
    if terminal is None:
        yield None
        return
    from tqdm import tqdm  # not needed by a program that draws no bar

    above = [LinesAbove(stream, terminal[0]) for stream in (sys.stdout, sys.stderr)]
    with configured_tqdm(tqdm), redirect_stdout(above[0]), redirect_stderr(above[1]):
        try:
            yield Terminal(*terminal)
        finally:
            for stream in above:
                stream.end()


@contextmanager
def configured_tqdm(tqdm: Any) -> Iterator[None]:
    """Turn off tqdm's monitor thread (our bars are updated when something happens) and the lock that it shares between processes
    (only one process draws). Restore both at the end, for the bars of a calling program.
    """
    before = tqdm.monitor_interval, getattr(tqdm, "_lock", None)
    tqdm.monitor_interval = 0
    tqdm.set_lock(threading.RLock())
    try:
        yield
    finally:
        tqdm.monitor_interval = before[0]
        if before[1] is None:
            del tqdm._lock
        else:
            tqdm.set_lock(before[1])


class Terminal:
    """A terminal on which bars are drawn.

    Args:
        stream: prints to the terminal.
        window: a file descriptor for the terminal's width.
    """

    def __init__(self, stream: IO[str], window: int) -> None:
        self._stream = stream
        self._window = Window(window)

    def bar(self, **options: Any) -> Any:
        """A tqdm bar that stays narrower than the terminal when its width changes; rates are means. Closing the bar removes it.

        Args:
            options: of tqdm: desc, total, initial, unit, bar_format.
        """
        from tqdm import tqdm

        bar = tqdm(file=self._stream, leave=False, mininterval=EVERY, smoothing=0, ncols=self.columns, **options)
        bar.dynamic_ncols = lambda _: (self.columns, None)  # tqdm's function asks the stream, whose size under mpirun is outdated
        return bar

    def bar_format(self, share: float) -> str:
        """tqdm's format, with the share that is done, from 0 to 1. In a terminal with few columns, the losses take the space of
        the bar."""
        return (BAR if self.columns >= WIDE else NARROW).replace(SHARE, f"{share:4.0%}")

    @property
    def columns(self) -> int:
        """The number of columns a bar may take."""
        return self._window.columns


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
        """Print the rest of an unfinished line."""
        self._stream.write(self._begun)
        self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
