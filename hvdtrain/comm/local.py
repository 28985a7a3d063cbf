"""The local launcher: processes that hvdtrain itself starts on this host (`++ngpu 4`), and watches.

The order: which processes to start, starting them, and watching them. Which ones start again after a failure: comm/restarts.py.
"""

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
from typing import TYPE_CHECKING

from hvdtrain.comm.child import ENDED, HUNG, PARENT, PEER_FAILED, TERMINATE_TIMEOUT, found_by_checks, has_ended
from hvdtrain.comm.launchers import Launch, variables
from hvdtrain.comm.torch_rendezvous import HVDTRAIN_PLACE
from hvdtrain.errors import BY_CTRL_C, TO_BE_CONTINUED, LaunchError

if TYPE_CHECKING:
    from hvdtrain.comm.keys import LaunchKeys

LAUNCHERS = {"slurm": "srun", "mpi": "mpirun"}
"""The launcher for each value of dist_launcher."""

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

REPORTED = (1, 2, TO_BE_CONTINUED, PEER_FAILED, HUNG, BY_CTRL_C)
"""The exit statuses of processes that say themselves how they end."""

POLL_INTERVAL = 0.05
"""Seconds between two looks at the processes."""

REPORT_TIMEOUT = 2.0
"""Seconds in which the other processes may report their errors after one has failed."""


def processes(keys: LaunchKeys, started: Launch) -> list[Launch]:
    """The processes that this one has to start; empty if this process itself trains.

    >>> from hvdtrain.comm.keys import LaunchKeys
    >>> [one.rank for one in processes(LaunchKeys(ngpu=2, dist_rank=1, dist_world_size=2), Launch(None))]
    [2, 3]

    Raises:
        LaunchError: the keys contradict the launcher, or do not determine this process's rank.
    """
    if started.launcher == "hvdtrain":
        return []
    if keys.dist_launcher is not None and started.launcher != LAUNCHERS[keys.dist_launcher]:
        raise LaunchError(
            f"dist_launcher: expected processes that {LAUNCHERS[keys.dist_launcher]} started for {keys.dist_launcher!r}, got "
            + ("a process without a launcher" if started.launcher is None else f"processes that {started.launcher} started")
        ).on_all_ranks()
    own = keys.ngpu or 1
    index, count = _index_and_count(keys, started)
    if own > 1 and started.size > 1 and not keys.multiprocessing_distributed:
        raise LaunchError(
            f"ngpu: expected 1 for processes that {started.launcher} started, got {own} (to train with these "
            f"{started.size} processes, leave ngpu out; to start {own} processes from each, ++multiprocessing_distributed true)"
        ).on_all_ranks()
    if own == 1 and (started.launcher is not None or count == 1) and not keys.max_restarts:
        return []
    first = started.local_rank * own
    return [Launch("hvdtrain", index * own + local, count * own, first + local, started.local_size * own) for local in range(own)]


def _index_and_count(keys: LaunchKeys, started: Launch) -> tuple[int, int]:
    """The index of this process and the number of processes, from the launcher or from the keys."""
    if keys.dist_world_size is None:
        return started.rank, started.size
    if started.launcher is None:
        if keys.dist_rank is None and keys.dist_world_size > 1:
            raise LaunchError(
                f"dist_rank: expected the rank of this process, of {keys.dist_world_size}, got nothing"
            ).on_all_ranks()
        return keys.dist_rank or 0, keys.dist_world_size
    rank = started.rank if keys.dist_rank is None else keys.dist_rank
    if (rank, keys.dist_world_size) != (started.rank, started.size):
        raise LaunchError(
            f"dist_rank, dist_world_size: expected what {started.launcher} says, {started.rank} of {started.size}, got {rank} of "
            f"{keys.dist_world_size} (leave them out)"
        )
    return started.rank, started.size


Again = Callable[[list[Launch], Mapping[int, int]], list[Launch]]
"""Of processes that were started, of which some failed (by rank, the exit statuses): those to start next; none: that was all."""


def never(wanted: list[Launch], failed: Mapping[int, int]) -> list[Launch]:
    """Start nothing again."""
    return []


PROGRAM = ("-m", "hvdtrain")
"""Of Python's arguments, those that start the command line."""


def run(
    wanted: list[Launch],
    arguments: Sequence[str],
    environ: Mapping[str, str],
    again: Again = never,
    *,
    program: Sequence[str] = PROGRAM,
    signals_to_forward: Sequence[signal.Signals] = FORWARDED_SIGNALS,
    report: Callable[[str], object] = sys.stderr.write,
    while_waiting: Callable[[], None] = lambda: None,
) -> int:
    """Start `python PROGRAM ARGUMENTS` once per launch; return the highest exit status.

    Signals are forwarded to the processes. If one of them fails, the others are ended within seconds, and unless a signal came,
    those start that `again` returns; if this process is killed, they end by themselves.

    Args:
        report: gets lines about processes that did not say themselves how they ended.
        while_waiting: called again and again until the processes have ended.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        ended = f"{folder}/ended"
        shared = dict(environ) | {PARENT: str(os.getpid()), ENDED: ended}
        if len(wanted) == wanted[0].size:  # all processes of the job are on this host
            shared[HVDTRAIN_PLACE] = f"file://{folder}/address"
        children: list[subprocess.Popen[bytes]] = []
        signals: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            signals.append(number)
            _signal(children, number)

        previous = {number: signal.signal(number, forward) for number in signals_to_forward}
        try:
            while True:
                for mark in Path(folder).glob("ended.*"):  # of a former start
                    mark.unlink()
                for started in wanted:
                    # In a session of its own, so that the terminal's Ctrl-C reaches this process only, which forwards it once.
                    children.append(
                        subprocess.Popen(
                            [sys.executable, *program, *arguments],
                            env=shared | variables(started),
                            start_new_session=True,
                        )
                    )
                for number in signals:  # that came before all had been started
                    _signal(children, number)
                failed = _wait(children, wanted, signals, ended, report, while_waiting)
                wanted = again(wanted, failed) if failed and not signals else []
                if not wanted:
                    return max(map(_exit_status, failed.values()), default=0)
                children.clear()
        finally:
            _signal([child for child in children if child.poll() is None], signal.SIGKILL)
            for child in children:
                child.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)


def how_it_ended(status: int, out_of_memory: bool) -> str | None:
    """How a process ended that has failed and had no chance to say it; None: it has said it itself.

    Args:
        status: as of `subprocess`: negative after a signal.
        out_of_memory: whether the kernel has killed a process of this host for lack of memory meanwhile.

    >>> how_it_ended(-9, True), how_it_ended(3, False), how_it_ended(1, False)
    ('ended by signal 9 (SIGKILL): the kernel ran out of memory', 'ended with exit status 3', None)
    >>> how_it_ended(0, False)
    'ended with exit status 0 before its work was done (by os._exit?)'
    """
    if status == 0:
        return "ended with exit status 0 before its work was done (by os._exit?)"
    if status < 0:
        why = ": the kernel ran out of memory" if out_of_memory and -status == signal.SIGKILL else ""
        why = ": a mapped file was cut off meanwhile, or its disk failed" if -status == signal.SIGBUS else why
        return f"ended by signal {-status} ({signal.Signals(-status).name}){why}"
    return None if status in REPORTED else f"ended with exit status {status}"


def out_of_memory() -> int:
    """How many processes the kernel has killed for lack of memory since this host was started; 0 where it does not say."""
    try:
        counts = Path("/proc/vmstat").read_text(encoding="ascii").split()
        return int(counts[counts.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return 0


def _exit_status(status: int) -> int:
    """As shells do it, from that of `subprocess`."""
    return 128 - status if status < 0 else 1 if status in (0, PEER_FAILED, HUNG) else status


def _wait(
    children: list[subprocess.Popen[bytes]],
    wanted: list[Launch],
    signals: list[int],
    prefix: str,
    report: Callable[[str], object],
    while_waiting: Callable[[], None],
) -> dict[int, int]:
    """Wait until all processes have ended; if one fails, end the others. By rank, the exit statuses of those that failed.

    Args:
        prefix: of the files in which ranks say that their work is done (an end with status 0 is a failure otherwise), and leave
            checks.
        report, while_waiting: as of `run`.
    """
    kills_before = out_of_memory()

    def statuses() -> dict[int, int]:
        """Of those that have failed so far."""
        ended = {one.rank: child.poll() for one, child in zip(wanted, children, strict=True)}
        return {rank: status for rank, status in ended.items() if status or (status == 0 and not has_ended(prefix, rank))}

    while not (failed := statuses()):
        if all(child.returncode == 0 for child in children):
            return {}
        while_waiting()
        time.sleep(POLL_INTERVAL)
    failed = {}
    for seconds in (0.0, REPORT_TIMEOUT):  # the first ones at once, as the others fail because of them
        _wait_at_most(children, seconds)
        ended = statuses()
        for rank, status in sorted(ended.items() - failed.items()):
            if -status not in signals and (how := how_it_ended(status, out_of_memory() > kills_before)) is not None:
                report(f"rank {rank} of {wanted[0].size}: {how}\n")
        failed = ended
    cut_off = [rank for rank, status in sorted(failed.items()) if -status == signal.SIGBUS]
    for found in dict.fromkeys(line for rank in cut_off for line in found_by_checks(prefix, rank)):
        report(f"{found}\n")
    _signal(children, signal.SIGTERM)
    _wait_at_most(children, TERMINATE_TIMEOUT)
    _signal(children, signal.SIGKILL)
    for child in children:
        child.wait()
    return failed


def _wait_at_most(children: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)


def _signal(children: list[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)
