"""Which terminal a stream prints to, also under Open MPI, and how wide it is."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

from hvdtrain.runtime.mpirun import MPIRUN, MPIRUN_OF_OPEN_MPI_5


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, as tqdm finds out."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def terminal_of(stream: IO[str] | None) -> int | None:
    """A file descriptor of the terminal that a stream prints to, for its width; None if it prints to a file or a pipe.

    Open MPI gives every rank a pseudo-terminal and forwards its output to that of mpirun. Only mpirun's file descriptors show
    whether that is a terminal, and its current width: the rank's pseudo-terminal keeps the size it had at the start, or has none.
    From version 5 on, Open MPI forwards whole lines only, so that a bar would not be seen until it is complete: no terminal.
    """
    if stream is None or not hasattr(stream, "isatty") or not stream.isatty():
        return None
    descriptor = stream.fileno()
    parent = f"/proc/{os.getppid()}"
    with suppress(OSError):
        name = Path(parent, "comm").read_text().strip()
        if name == MPIRUN_OF_OPEN_MPI_5:
            return None
        if name.startswith(MPIRUN) and (window := _opened_terminal(f"{parent}/fd/{descriptor}")) is not None:
            return window
    return descriptor if os.get_terminal_size(descriptor).columns else None


@cache
def _opened_terminal(path: str) -> int | None:
    """A descriptor of a terminal, which stays open: each bar and each command asks for it. None: it is no terminal."""
    window = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    if os.isatty(window) and os.get_terminal_size(window).columns:
        return window
    os.close(window)
    return None


class Window:
    """A terminal's width.

    Args:
        descriptor: a file descriptor of the terminal.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._columns = 79

    @property
    def columns(self) -> int:
        """The number of columns that a line may take. The last one stays empty: with a character there, some terminals wrap."""
        with suppress(OSError):  # a closed terminal has no size
            self._columns = (os.get_terminal_size(self._descriptor).columns or 80) - 1
        return self._columns
