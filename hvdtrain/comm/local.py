"""The local launcher: processes that hvdtrain itself starts on this host (`++ngpu 4`), and starts again after one was killed.

The order: which processes to start, starting and watching them, which ones a failure starts again, and the error that torchrun,
which restarts ranks whatever ended them, must not repeat.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from hvdtrain.comm.launch import Launch, variables
from hvdtrain.comm.torch_rendezvous import HVDTRAIN_PLACE
from hvdtrain.errors import HvdtrainError, LaunchError, TrainingError

if TYPE_CHECKING:
    from hvdtrain.comm.keys import LaunchKeys

LAUNCHERS = {"slurm": "srun", "mpi": "mpirun"}
"""The launcher for each value of dist_launcher."""

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

PARENT = "HVDTRAIN_PARENT"
"""The environment variable with the process id of the launcher."""

ENDED = "HVDTRAIN_ENDED"
"""The environment variable with the beginning of the names of files by which processes tell this launcher that their work is
done: an exit status of 0 alone, as of `os._exit(0)`, does not."""

PEER_FAILED = 76
"""Exit status of a process of hvdtrain's launcher that ends only because another one has failed. The launcher returns 1."""

HUNG = 77
"""Exit status of a process of hvdtrain's launcher that its watchdog has ended, as it hung. The launcher returns 1."""

REPORTED = (1, 2, 75, PEER_FAILED, HUNG, 130)
"""The exit statuses of processes that say themselves how they end."""

POLL_INTERVAL = 0.05
"""Seconds between two looks at the processes."""

REPORT_TIMEOUT = 2.0
"""Seconds in which the other processes may report their errors after one has failed."""

TERMINATE_TIMEOUT = 5.0
"""Seconds between SIGTERM and SIGKILL."""

STOP_TIMEOUT = 60.0
"""Seconds that ranks without a launcher have to stop with a checkpoint; nobody else would end one that hangs."""


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
        raise _on_every_rank(
            f"dist_launcher: expected processes that {LAUNCHERS[keys.dist_launcher]} started for {keys.dist_launcher!r}, got "
            + ("a process without a launcher" if started.launcher is None else f"processes that {started.launcher} started")
        )
    own = keys.ngpu or 1
    index, count = _index_and_count(keys, started)
    if own > 1 and started.size > 1 and not keys.multiprocessing_distributed:
        raise _on_every_rank(
            f"ngpu: expected 1 for processes that {started.launcher} started, got {own} (to train with these "
            f"{started.size} processes, leave ngpu out; to start {own} processes from each, ++multiprocessing_distributed true)"
        )
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
            raise _on_every_rank(f"dist_rank: expected the rank of this process, of {keys.dist_world_size}, got nothing")
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
        shared = dict(environ) | {PARENT: str(os.getpid()), ENDED: f"{folder}/ended"}
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
                failed = _wait(children, wanted, signals, Path(folder), report, while_waiting)
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


def note_end(environ: Mapping[str, str], rank: int) -> None:
    """Tell hvdtrain's launcher, if it started this process, that the work is done."""
    if ENDED in environ:
        Path(f"{environ[ENDED]}.{rank}").touch()


class Check(Protocol):
    """Something that can be pickled, and that finds out what may have ended a process."""

    def check(self) -> None:
        """Raises: HvdtrainError, which says it."""
        ...


def leave_checks(environ: Mapping[str, str], rank: int, checks: Sequence[Check]) -> None:
    """Leave hvdtrain's launcher, if it started this process, what to check if a signal ends it.

    The other ranks may be ended by the same signal at the same time, and could not say anything either.
    """
    if ENDED in environ:
        path = Path(f"{environ[ENDED]}.{rank}.checks")
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(list(checks)))
        unfinished.replace(path)


def _found_by_checks(folder: Path, rank: int) -> Iterator[str]:
    path = folder / f"ended.{rank}.checks"
    for one in pickle.loads(path.read_bytes()) if path.exists() else ():
        try:
            one.check()
        except HvdtrainError as error:
            yield str(error)


def end_with_launcher(environ: Mapping[str, str]) -> None:
    """Watch the process that started this one, and stop when it is gone: a killed launcher cannot end its ranks.

    A training, which handles SIGTERM, stops with a checkpoint, as its other ranks do; anything else ends within seconds. The
    daemons of mpirun, Slurm and horovodrun end their ranks themselves.
    """
    parent = _launcher(environ)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            time.sleep(TERMINATE_TIMEOUT)  # it may be about to end, with the other ranks
        else:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(STOP_TIMEOUT)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _launcher(environ: Mapping[str, str]) -> int | None:
    """The process id of the launcher, if this process has to watch it."""
    if PARENT in environ:
        return int(environ[PARENT])
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environ else None


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


def _has_ended(folder: Path, rank: int) -> bool:
    return (folder / f"ended.{rank}").exists()


def _wait(
    children: list[subprocess.Popen[bytes]],
    wanted: list[Launch],
    signals: list[int],
    folder: Path,
    report: Callable[[str], object],
    while_waiting: Callable[[], None],
) -> dict[int, int]:
    """Wait until all processes have ended; if one fails, end the others. By rank, the exit statuses of those that failed.

    Args:
        folder: where ranks say that their work is done (an end with status 0 is a failure otherwise), and leave checks.
        report, while_waiting: as of `run`.
    """
    kills_before = out_of_memory()

    def statuses() -> dict[int, int]:
        """Of those that have failed so far."""
        ended = {one.rank: child.poll() for one, child in zip(wanted, children, strict=True)}
        return {rank: status for rank, status in ended.items() if status or (status == 0 and not _has_ended(folder, rank))}

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
    for found in dict.fromkeys(line for rank in cut_off for line in _found_by_checks(folder, rank)):
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


def _on_every_rank(text: str) -> LaunchError:
    error = LaunchError(text)
    error.on_every_rank = True
    return error


class Restarts:
    """Which processes of hvdtrain's launcher start again after a failure.

    Only a death by a signal is followed by a restart: SIGKILL of a user, the batch system or the kernel, or a crash of native
    code; and the watchdog's end of a process that hung, as in a file system or a GPU that does not answer. A process that ends by
    itself, with a traceback or with any status, would most likely do it again. All processes start again, since none can go on
    without the others, and with as many as before the training is that of an undisturbed one.

    If they are killed again before a checkpoint was written, there is one process fewer from then on, where that is allowed: what
    kills them may be that the host has no memory for all. It is not the default, as it changes the number of batches per update.

    Args:
        most: restarts in all.
        fewest: the number of processes to which it may fall; None: it stays.
        newest: the checkpoint from which a start goes on, if there is one.
    """

    def __init__(self, most: int, fewest: int | None, newest: Callable[[], Path | None]) -> None:
        self._most = most
        self._fewest = fewest
        self._newest = newest
        self._count = 0
        self._at_last_start = newest() if most else None

    def __call__(self, started: list[Launch], failed: Mapping[int, int]) -> list[Launch]:
        """Collects what to start instead of the processes that have ended; nothing: the job has failed.

        Args:
            failed: by rank, the exit status of those that failed by themselves, as of `subprocess`: negative after a signal.
        """
        killed = {rank: f"was ended by {signal.Signals(-status).name}" for rank, status in failed.items() if status < 0}
        lost = killed | {rank: "hung and was ended by its watchdog" for rank, status in failed.items() if status == HUNG}
        errors = [rank for rank, status in failed.items() if status >= 0 and status not in (PEER_FAILED, HUNG)]
        if errors or not lost or not self._most:
            return []
        who = ", ".join(f"rank {rank} of {len(started)} {how}" for rank, how in lost.items())
        if self._count == self._most:
            sys.stderr.write(f"{who}: no restart, after {self._count} of {self._most} (max_restarts)\n")
            return []
        newest = self._newest()
        size = len(started)
        if self._count and newest == self._at_last_start and self._fewest is not None and killed:
            size = max(self._fewest, size - 1)
        self._count += 1
        self._at_last_start = newest
        ranks = "1 rank goes" if size == 1 else f"{size} ranks go"
        place = "from the beginning" if newest is None else f"from {newest}"
        fewer = ", as no checkpoint was written since the last restart (min_ngpu)" if size < len(started) else ""
        sys.stderr.write(f"restart {self._count} of {self._most}: {who}; {ranks} on {place}{fewer}\n")
        return [replace(one, size=size, local_size=size) for one in started[:size]]


def check_restarts(keys: LaunchKeys, started: Launch, own: list[Launch]) -> None:
    """Raise LaunchError if max_restarts is set where hvdtrain's launcher does not start all processes of the job.

    Args:
        started: how this process was launched.
        own: the processes that it has to start.
    """
    if not keys.max_restarts or started.launcher == "hvdtrain":
        return
    error: LaunchError | None = None
    if started.launcher is not None:
        instead = {
            "torchrun": "torchrun --max-restarts N restarts them",
            "srun": "sbatch --requeue starts the job again",
            "horovodrun": "horovodrun --min-np N --host-discovery-script SCRIPT restarts them",
        }.get(started.launcher, "the same command goes on from the newest checkpoint; torchrun --max-restarts N restarts ranks")
        error = LaunchError(
            f"max_restarts: expected processes that hvdtrain starts itself (ngpu), got those of {started.launcher} ({instead})"
        )
    elif own and len(own) != own[0].size:
        error = LaunchError(
            f"max_restarts: expected all {own[0].size} processes on this host, got {len(own)} of them (on several hosts: "
            "torchrun --max-restarts N)"
        )
    if error is not None:
        error.on_every_rank = True
        raise error


@dataclass(frozen=True)
class Failure:
    """What ended a job, and would end it again.

    Attributes:
        status: the exit status of the rank.
        text: what the rank printed.
    """

    status: int
    text: str

    @property
    def refusal(self) -> str:
        """Why the next attempt does not train."""
        return f"not started again after an error that would only repeat (see above): {self.text}"


def remember_failure(environ: Mapping[str, str], failure: Failure) -> None:
    """Leave an error for the next attempt of torchrun, which restarts ranks whatever ended them. The first one counts."""
    path = _record(environ)
    if path is not None:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(f"{failure.status}\n{failure.text}")
        except OSError:
            pass  # another rank was first; or the folder is gone, and torchrun restarts what it would have restarted anyway


def remembered_failure(environ: Mapping[str, str]) -> Failure | None:
    """The error that a former attempt of the same torchrun ended with."""
    path = _record(environ)
    if path is None or not path.exists():
        return None
    status, _, text = path.read_text(encoding="utf-8").partition("\n")
    return Failure(int(status) if status.isdigit() else 1, text)


def refuse_to_repeat(environ: Mapping[str, str]) -> None:
    """Raise TrainingError if a former attempt of the same torchrun ended with an error."""
    failure = remembered_failure(environ)
    if failure is not None:
        raise TrainingError(failure.refusal)


def tell_failure(environ: Mapping[str, str], failure: Failure) -> None:
    """Print why this attempt of torchrun ends at once, unless another rank of the host has: who ends first ends the others."""
    attempt = _attempt(environ)
    if attempt is None or (attempt / "hvdtrain-told").exists():
        return
    sys.stderr.write(f"{failure.refusal}\n")
    sys.stderr.flush()
    try:
        (attempt / "hvdtrain-told").touch()
    except OSError:
        pass  # the others print it, too


def _record(environ: Mapping[str, str]) -> Path | None:
    """The file of `remember_failure`: beside the folders of attempts, of which every torchrun makes a new one on its host."""
    attempt = _attempt(environ)
    return None if attempt is None else attempt.parent / "hvdtrain-error"


def _attempt(environ: Mapping[str, str]) -> Path | None:
    """The folder of this attempt of a torchrun that may restart its ranks."""
    parents = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    if not restarts_of_torchrun(environ) or len(parents) < 3 or not parents[1].name.startswith("attempt_"):
        return None
    return parents[1]


def restarts_of_torchrun(environ: Mapping[str, str]) -> int:
    """How often torchrun may restart its ranks.

    >>> restarts_of_torchrun({"TORCHELASTIC_MAX_RESTARTS": "3"}), restarts_of_torchrun({})
    (3, 0)
    """
    text = environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    return int(text) if text.isdigit() else 0
