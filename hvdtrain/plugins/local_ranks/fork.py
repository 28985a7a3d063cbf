"""Forks of this process, where that is safe: it has neither threads nor devices, whose state a fork could not use."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.comm.child import PARENT_WATCH

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
"""How the files of GPUs and the like begin."""


def obstacle(sleeping: int = 0) -> str:
    """Why this process must not be forked; '': it may be.

    Args:
        sleeping: the number of threads that only sleep, and so hold no lock that a fork could inherit.
    """
    pid = _fork()  # makes OpenBLAS and others end threads that they start again when needed
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = len(os.listdir("/proc/self/task")) - 1 - sleeping
    if threads > 0:
        return f"{threads} threads run after the imports"
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(file).startswith(DEVICES):
                return f"{os.readlink(file)} is open after the imports"
    return ""


def _fork() -> int:
    """os.fork, without the warning of Python 3.12 that threads may hold locks: callers look at the threads themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def rename(name: str) -> str:
    """Give this process a name in /proc; return the one before."""
    path = Path("/proc/self/comm")
    before = path.read_text(encoding="utf-8").rstrip("\n")
    path.write_text(name, encoding="utf-8")
    return before


class ForkedProcess:
    """A forked rank, with the interface of `subprocess.Popen` that a launcher needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative after a signal; None: it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for its end; return the exit status."""
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass(frozen=True)
class Fork:
    """A fork of this process that does something for it.

    Attributes:
        connection: to it.
    """

    process: ForkedProcess
    connection: Connection


def fork(serve: Callable[[Connection, int], object]) -> Fork | None:
    """Fork this process, if that is safe now; None: it is not, or there is no memory for it.

    Args:
        serve: called in the fork with a connection to this process, and this process's id. The fork ends with it.
    """
    if obstacle(sum(thread.name == PARENT_WATCH for thread in threading.enumerate())):
        return None
    from multiprocessing import Pipe

    parent = os.getpid()
    connection, fork_end = Pipe()
    with fork_end:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = _fork()
        except OSError:
            return None
        if pid == 0:
            try:
                connection.close()
                serve(fork_end, parent)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
    return Fork(ForkedProcess(pid), connection)
