"""Processes that hvdtrain starts itself on this host: `++ngpu 4`, or one of several that were started by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from types import FrameType

from hvdtrain.comm.keys import LaunchKeys
from hvdtrain.comm.launch import Launch, variables
from hvdtrain.comm.rendezvous import HVDTRAIN_PLACE
from hvdtrain.errors import LaunchError

LAUNCHERS = {"slurm": "srun", "mpi": "mpirun"}
"""What the values of dist_launcher are called here."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

PARENT = "HVDTRAIN_PARENT"

PAUSE = 0.05
GRACE = 2.0
"""Seconds that the others have to tell what they saw when one process has failed."""

PATIENCE = 5.0
"""Seconds from being asked to end to being killed."""


def processes(keys: LaunchKeys, started: Launch) -> list[Launch]:
    """The processes that this one is to start. None: it is itself one of those that train.

    >>> [one.rank for one in processes(LaunchKeys(ngpu=2, dist_rank=1, dist_world_size=2), Launch(None))]
    [2, 3]

    Raises:
        LaunchError: the keys contradict the launcher, or leave open which process this is.
    """
    if started.launcher == "hvdtrain":
        return []
    if keys.dist_launcher is not None and started.launcher != LAUNCHERS[keys.dist_launcher]:
        raise _on_every_rank(
            f"dist_launcher: expected processes that {LAUNCHERS[keys.dist_launcher]} started for {keys.dist_launcher!r}, got "
            + ("one that nothing started" if started.launcher is None else f"some that {started.launcher} started")
        )
    own = keys.ngpu or 1
    number, count = _which(keys, started)
    if own > 1 and started.size > 1 and not keys.multiprocessing_distributed:
        raise _on_every_rank(
            f"ngpu: expected 1 for processes that {started.launcher} started, got {own}: is each of the {started.size} to train "
            f"on one GPU (leave ngpu out), or to start {own} processes more (++multiprocessing_distributed true)?"
        )
    if own == 1 and (started.launcher is not None or count == 1):
        return []
    first = started.local_rank * own
    return [
        Launch("hvdtrain", number * own + local, count * own, first + local, started.local_size * own) for local in range(own)
    ]


def _which(keys: LaunchKeys, started: Launch) -> tuple[int, int]:
    """This process's number and how many there are, by the launcher or by the keys."""
    if keys.dist_world_size is None:
        return started.rank, started.size
    if started.launcher is None:
        if keys.dist_rank is None and keys.dist_world_size > 1:
            raise _on_every_rank(f"dist_rank: expected the number of this process, of {keys.dist_world_size}, got nothing")
        return keys.dist_rank or 0, keys.dist_world_size
    rank = started.rank if keys.dist_rank is None else keys.dist_rank
    if (rank, keys.dist_world_size) != (started.rank, started.size):
        raise LaunchError(
            f"dist_rank, dist_world_size: expected what {started.launcher} says, {started.rank} of {started.size}, got {rank} of "
            f"{keys.dist_world_size} (leave them out)"
        )
    return started.rank, started.size


def run(wanted: list[Launch], arguments: list[str], environ: Mapping[str, str]) -> int:
    """Start `python -m hvdtrain ARGUMENTS` as each of these processes; return the exit status for all of them.

    Signals are passed on. When one process fails, the others are ended within seconds. When this one is killed, they end, too.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        everybody = dict(environ) | {PARENT: str(os.getpid())}
        if len(wanted) == wanted[0].size:  # no other host takes part
            everybody[HVDTRAIN_PLACE] = f"file://{folder}/address"
        children: list[subprocess.Popen[bytes]] = []
        signals: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            signals.append(number)
            _signal(children, number)

        before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
        try:
            for started in wanted:
                # A session of its own: the terminal's Ctrl-C comes here only, and is passed on once.
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "hvdtrain", *arguments], env=everybody | variables(started), start_new_session=True
                    )
                )
            return _wait(children, wanted, signals)
        finally:
            _signal([child for child in children if child.poll() is None], signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)


def end_with_parent(environ: Mapping[str, str]) -> None:
    """In a process that `run` started: end when the parent is there no more, which could then not end this one."""
    parent = environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _wait(children: list[subprocess.Popen[bytes]], wanted: list[Launch], signals: list[int]) -> int:
    """Until all have ended; where one fails, see to it that the others do."""
    while all(child.poll() in (None, 0) for child in children):
        if all(child.returncode == 0 for child in children):
            return 0
        time.sleep(PAUSE)
    _until_ended(children, GRACE)
    failed = {one.rank: child.returncode for one, child in zip(wanted, children, strict=True) if child.poll() not in (None, 0)}
    for rank, status in failed.items():
        if status < 0 and -status not in signals:
            sys.stderr.write(f"rank {rank} of {wanted[0].size}: ended by signal {-status} ({signal.Signals(-status).name})\n")
    _signal(children, signal.SIGTERM)
    _until_ended(children, PATIENCE)
    _signal(children, signal.SIGKILL)
    for child in children:
        child.wait()
    return max(128 - status if status < 0 else status for status in failed.values())


def _until_ended(children: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(PAUSE)


def _signal(children: list[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _on_every_rank(text: str) -> LaunchError:
    error = LaunchError(text)
    error.on_every_rank = True
    return error
