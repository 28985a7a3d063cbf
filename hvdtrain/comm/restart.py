"""Starting ranks again after one was killed: what is restarted, how often, and which failures a restart would only repeat."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.comm.keys import LaunchKeys
from hvdtrain.comm.launch import Launch
from hvdtrain.errors import LaunchError

PEER_FAILED = 76
"""Exit status of a process of hvdtrain's launcher that ends only because another one has failed. The launcher returns 1."""


class Restarts:
    """Which processes of hvdtrain's launcher start again after a failure.

    Only a death by a signal is followed by a restart: SIGKILL of a user, the batch system or the kernel, or a crash of native
    code. A process that ends by itself, with a traceback or with any status, would most likely do it again. All processes start
    again, since none can go on without the others, and with as many as before the training is that of an undisturbed one.

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
        killed = {rank: signal.Signals(-status).name for rank, status in failed.items() if status < 0}
        errors = [rank for rank, status in failed.items() if status >= 0 and status != PEER_FAILED]
        if errors or not killed or not self._most:
            return []
        who = ", ".join(f"rank {rank} of {len(started)} was ended by {name}" for rank, name in killed.items())
        if self._count == self._most:
            sys.stderr.write(f"{who}: no restart, after {self._count} of {self._most} (max_restarts)\n")
            return []
        newest = self._newest()
        size = len(started)
        if self._count and newest == self._at_last_start and self._fewest is not None:
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


def remember(environ: Mapping[str, str], failure: Failure) -> None:
    """Leave an error for the next attempt of torchrun, which restarts ranks whatever ended them. The first one counts."""
    path = _record(environ)
    if path is not None:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(f"{failure.status}\n{failure.text}")
        except OSError:
            pass  # another rank was first; or the folder is gone, and torchrun restarts what it would have restarted anyway


def remembered(environ: Mapping[str, str]) -> Failure | None:
    """The error that a former attempt of the same torchrun ended with."""
    path = _record(environ)
    if path is None or not path.exists():
        return None
    status, _, text = path.read_text(encoding="utf-8").partition("\n")
    return Failure(int(status) if status.isdigit() else 1, text)


def tell(environ: Mapping[str, str], failure: Failure) -> None:
    """Print why this attempt of torchrun ends at once, unless another rank of the host has: who ends first ends the others."""
    attempt = _attempt(environ)
    if attempt is None or (attempt / "hvdtrain-told").exists():
        return
    sys.stderr.write(f"not started again after an error that would only repeat (see above): {failure.text}\n")
    sys.stderr.flush()
    try:
        (attempt / "hvdtrain-told").touch()
    except OSError:
        pass  # the others print it, too


def _record(environ: Mapping[str, str]) -> Path | None:
    """The file for `remember`: beside the folders of torchrun's attempts, of which every torchrun makes a new one on its host."""
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
