"""Starts processes on this host and watches them. `restarts.py` decides which ones to start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hvdtrain.comm.child import TERMINATE_TIMEOUT
from hvdtrain.comm.launchers import Place
from hvdtrain.comm.meeting_point import HVDTRAIN_INIT_METHOD
from hvdtrain.errors import BY_CTRL_C, STOP_SIGNALS, TO_BE_CONTINUED
from hvdtrain.plugins.local_ranks.fork import ForkedProcess
from hvdtrain.plugins.local_ranks.fork_server import ForkServer
from hvdtrain.plugins.local_ranks.reports import (
    CAUSE,
    ENDED,
    HUNG,
    PARENT,
    PEER_FAILED,
    TIMES,
    report_file,
    run_checks,
    variables,
)

REPORTED = (1, 2, TO_BE_CONTINUED, PEER_FAILED, HUNG, BY_CTRL_C)
"""The exit statuses of processes that print themselves why they end."""

POLL_INTERVAL = 0.05
"""Seconds between two polls of the processes."""

REPORT_TIMEOUT = 2.0
"""Seconds in which the other processes may report their errors after one has failed."""

Child = subprocess.Popen[bytes] | ForkedProcess

RestartRule = Callable[[list[Place], Mapping[int, int]], list[Place]]
"""Called with the places of the processes that were started, and the exit statuses of those that failed, by rank; returns the
places of those to start next."""

PROGRAM = ("-m", "hvdtrain")
"""Python's arguments that start the command line."""


def launch(
    places: list[Place],
    arguments: Sequence[str],
    environ: Mapping[str, str],
    restarts: RestartRule = lambda places, failed: [],
    *,
    program: Sequence[str] = PROGRAM,
    signals_to_forward: Sequence[signal.Signals] = STOP_SIGNALS,
    report: Callable[[str], object] = lambda text: sys.stderr.write(text),  # it may be None while this is imported
    while_waiting: Callable[[], None] = lambda: None,
    began: float | None = None,
    imports: Sequence[str] = (),
) -> int:
    """Start `python PROGRAM ARGUMENTS` once per place; return the highest exit status.

    Signals are forwarded to the processes. If one of them fails, the others are ended within seconds, and unless a signal was
    received, the processes that `restarts` returns are started. If this process is killed, they end by themselves.

    Args:
        report: called with lines about processes that did not print themselves why they ended.
        while_waiting: called repeatedly until the processes have ended.
        began: when this job began; None: now.
        imports: modules to import in a process that is forked for every rank, if that is safe; empty: ranks are new programs.
    """
    times = [time.monotonic() - (0.0 if began is None else max(0.0, time.time() - began))]  # the clock may be set meanwhile
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        ended = f"{folder}/ended"
        shared = dict(environ) | {PARENT: str(os.getpid()), ENDED: ended}
        if len(places) == places[0].size:  # all processes of the job are on this host
            shared[HVDTRAIN_INIT_METHOD] = f"file://{folder}/address"
        children: list[Child] = []
        signals: list[int] = []
        command = [sys.executable, *program, *arguments]
        server = ForkServer(command, shared, imports, report) if imports else None

        def start(more: Mapping[str, str]) -> Child:
            forked = None if server is None else server.start(more, lambda: bool(signals))
            # A new session, so that the terminal's Ctrl-C reaches this process only, which forwards it once.
            return forked or subprocess.Popen(command, env={**shared, **more}, start_new_session=True)

        def forward(number: int, frame: FrameType | None) -> None:
            signals.append(number)
            _signal(children, number)

        # nohup's SIGHUP stays ignored, here and in the processes.
        forwarded = [number for number in signals_to_forward if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, forward) for number in forwarded}
        try:
            while True:
                for file in Path(folder).glob("ended.*"):  # of an earlier start
                    file.unlink()
                for place in places:
                    children.append(start(variables(place) | {TIMES: ",".join(map(str, times))}))
                for number in signals:  # received before all were started
                    _signal(children, number)
                failed = _wait(children, places, signals, ended, report, while_waiting, times.append)
                places = restarts(places, failed) if failed and not signals else []
                if not places:
                    return max(map(_exit_status, failed.values()), default=0)
                children.clear()
        finally:
            _signal([child for child in children if child.poll() is None], signal.SIGKILL)
            for child in children:
                child.wait()
            if server is not None:
                server.close()
            for number, handler in previous.items():
                signal.signal(number, handler)


def describe_end(status: int, out_of_memory: bool) -> str | None:
    """How a failed process ended; None: it has printed that itself.

    Args:
        status: as of `subprocess`: negative after a signal.
        out_of_memory: whether the kernel has killed a process of this host meanwhile because it ran out of memory.

    >>> describe_end(-9, True), describe_end(3, False), describe_end(1, False)
    ('ended by signal 9 (SIGKILL): the kernel ran out of memory', 'ended with exit status 3', None)
    >>> describe_end(0, False)
    'ended with exit status 0 before its work was done (by os._exit?)'
    """
    if status == 0:
        return "ended with exit status 0 before its work was done (by os._exit?)"
    if status < 0:
        why = ": the kernel ran out of memory" if out_of_memory and -status == signal.SIGKILL else ""
        why = ": a mapped file was cut off meanwhile, or its disk failed" if -status == signal.SIGBUS else why
        return f"ended by signal {-status} ({signal.Signals(-status).name}){why}"
    return None if status in REPORTED else f"ended with exit status {status}"


def oom_kills() -> int:
    """The number of processes that the kernel has killed since boot because it ran out of memory; 0 if that is unknown."""
    try:
        counts = Path("/proc/vmstat").read_text(encoding="ascii").split()
        return int(counts[counts.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return 0


def _exit_status(status: int) -> int:
    """The exit status as in shells, from that of `subprocess`."""
    return 128 - status if status < 0 else 1 if status in (0, PEER_FAILED, HUNG) else status


def _wait(
    children: Sequence[Child],
    places: list[Place],
    signals: list[int],
    prefix: str,
    report: Callable[[str], object],
    while_waiting: Callable[[], None],
    on_failure: Callable[[float], object],
) -> dict[int, int]:
    """Wait until all processes have ended; if one fails, end the others. Return the exit statuses of those that failed, by rank.

    Args:
        prefix: of the files with which ranks report that their work is done (otherwise, status 0 is a failure) and leave checks.
        report, while_waiting: as of `launch`.
        on_failure: called with the time of the first failure, of the monotonic clock.
    """
    kills_before = oom_kills()

    def statuses() -> dict[int, int]:
        """Of the processes that have failed so far."""
        ended = {place.rank: child.poll() for place, child in zip(places, children, strict=True)}
        return {
            rank: status for rank, status in ended.items() if status or (status == 0 and not report_file(prefix, rank).exists())
        }

    while not (failed := statuses()):
        if all(child.returncode == 0 for child in children):
            return {}
        while_waiting()
        time.sleep(POLL_INTERVAL)
    on_failure(time.monotonic())
    failed = {}
    for seconds in (0.0, REPORT_TIMEOUT):  # report the first ones at once, as the others fail because of them
        _wait_at_most(children, seconds)
        ended = statuses()
        for rank, status in sorted(ended.items() - failed.items()):
            if -status not in signals and (how := describe_end(status, oom_kills() > kills_before)) is not None:
                report(f"rank {rank} of {places[0].size}: {how}\n")
        failed = ended
        report_file(prefix, CAUSE).touch()
    cut_off = [rank for rank, status in sorted(failed.items()) if -status == signal.SIGBUS]
    for line in dict.fromkeys(line for rank in cut_off for line in run_checks(prefix, rank)):
        report(f"{line}\n")
    _signal(children, signal.SIGTERM)
    _wait_at_most(children, TERMINATE_TIMEOUT)
    _signal(children, signal.SIGKILL)
    for child in children:
        child.wait()
    return failed


def _wait_at_most(children: Sequence[Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)


def _signal(children: Sequence[Child], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)
