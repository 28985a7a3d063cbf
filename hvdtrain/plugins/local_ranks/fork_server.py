"""Forks ranks from a process that has imported what they need, so that a restart takes no time for imports.

The process has neither threads nor devices, which a fork would leave in a state that cannot be used; `obstacle` checks that. It
has the arguments of a rank, and every fork of it returns from `serve` and goes on as the rank. Forked ranks
are children of the launcher, which is their subreaper: it waits for them, and they watch it, as if it had started them itself.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain.comm import this_process
from hvdtrain.plugins.local_ranks.fork import ForkedProcess, obstacle, rename

ASKED = "HVDTRAIN_FORK_SERVER"
"""The environment variable that makes a process a fork server: the number of its connection, and the modules to import."""

NAME = "hvdtrain-fork"
"""Its name in /proc, ps and top."""

PR_SET_CHILD_SUBREAPER = 36

POLL_INTERVAL = 0.05

CLOSE_TIMEOUT = 5.0


def serve() -> None:
    """Become a fork server, if the process was started as one: returns in its forks only, which are ranks."""
    request = this_process.take(ASKED)
    if request is None:
        return
    from multiprocessing.connection import Connection  # here, as are others below: `--help` imports this file

    number, _, modules = request.partition(":")
    name = rename(NAME)
    connection = Connection(int(number))
    try:
        for module in modules.split(","):
            importlib.import_module(module)
    except Exception as error:  # a new process reports it better
        connection.send(f"{type(error).__name__}: {error}")
        os._exit(1)
    gc.collect()
    gc.freeze()  # what is imported stays, and is not copied because the collector looks at it
    connection.send(obstacle())
    while True:
        try:
            variables = connection.recv()
        except (EOFError, OSError):  # the launcher has ended
            os._exit(0)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = _fork_for_grandparent()
        if pid == 0:
            break
        connection.send(pid)
    connection.close()
    os.setsid()  # so that the terminal's Ctrl-C reaches the launcher only
    rename(name)
    this_process.put(variables)
    _reseed()


def _fork_for_grandparent() -> int:
    """Fork a process whose parent is this one's, if that is a subreaper; return its id (-1: the fork failed), and there 0."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(write_end, str(pid).encode())
            os._exit(0)
        while os.getppid() == between:  # until it has another parent, which it watches from now on
            time.sleep(0.001)
        os.close(write_end)
    else:
        os.close(write_end)
        os.waitpid(between, 0)
        pid = int(os.read(read_end, 32) or -1)
    os.close(read_end)
    return pid


def _reseed() -> None:
    """Give the generators of Python and numpy other random numbers than in other forks, as in a new process."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


class ForkServer:
    """The launcher's side: starts a fork server, and ranks through it.

    Args:
        command: of a rank.
        environ: that of the ranks, without what differs between them.
        modules: to import.
        report: called with a line if ranks cannot be forked.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], modules: Sequence[str], report: Callable[[str], object]
    ) -> None:
        self._report = report
        # Not multiprocessing's fork server: its processes are not the launcher's children, and end without Python's usual exit.
        from multiprocessing import Pipe

        self._connection, server_end = Pipe()
        with server_end:
            self._process = subprocess.Popen(
                command,
                env={**environ, ASKED: f"{server_end.fileno()}:{','.join(modules)}"},
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )
        self._is_ready = False
        self._is_usable = True

    def start(self, variables: Mapping[str, str], is_stopped: Callable[[], bool]) -> ForkedProcess | None:
        """Fork a rank with more environment variables; None: it has to be started in another way.

        Args:
            is_stopped: whether to give up, as the job is to end.
        """
        if not self._is_usable:
            return None
        try:
            if not self._is_ready:
                self._wait(is_stopped)
            if self._is_usable and not is_stopped():
                return self._fork(variables)
        except (EOFError, OSError) as error:  # it was killed
            self._give_up(f"the process to fork has ended ({type(error).__name__})")
        return None

    def _wait(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until the modules are imported. Raises: EOFError, OSError."""
        while not self._connection.poll(POLL_INTERVAL):
            if is_stopped():
                return
        problem = self._connection.recv()
        self._is_ready = True
        if problem:
            self._give_up(problem)

    def _fork(self, variables: Mapping[str, str]) -> ForkedProcess | None:
        """Raises: EOFError, OSError."""
        _adopt_orphans(True)
        try:
            self._connection.send(dict(variables))
            pid = self._connection.recv()
        finally:
            _adopt_orphans(False)
        if pid <= 0:
            self._give_up("the fork failed")
            return None
        process = ForkedProcess(pid)
        try:
            process.poll()
        except ChildProcessError:  # the system has no subreapers
            os.kill(pid, signal.SIGKILL)
            self._give_up("a forked process is not a child of the launcher")
            return None
        return process

    def _give_up(self, why: str) -> None:
        self._is_usable = False
        self._report(f"ranks start as new programs, which takes longer than forking them: {why}\n")
        self.close()

    def close(self) -> None:
        """End the fork server. Its ranks go on."""
        self._connection.close()
        try:
            self._process.wait(CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _adopt_orphans(wanted: bool) -> None:
    """Make this process the parent of processes below it whose parents end, or not. Raises: OSError."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
