"""Which of the processes that hvdtrain itself starts are started again after a failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.comm.child import HUNG, PEER_FAILED
from hvdtrain.comm.launchers import Launch, Launcher
from hvdtrain.errors import LaunchError

if TYPE_CHECKING:
    from hvdtrain.comm.keys import LaunchKeys


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


def check_restarts(keys: LaunchKeys, launcher: Launcher, own: list[Launch]) -> None:
    """Raise LaunchError if max_restarts is set where hvdtrain's launcher does not start all processes of the job.

    Args:
        launcher: that of this process.
        own: the processes that this process has to start.
    """
    if not keys.max_restarts or launcher.name == "hvdtrain":
        return
    if launcher.name is not None:
        raise LaunchError(
            f"max_restarts: expected processes that hvdtrain starts itself (ngpu), got those of {launcher.name} "
            f"({launcher.max_restarts_hint})"
        ).on_all_ranks()
    if own and len(own) != own[0].size:
        raise LaunchError(
            f"max_restarts: expected all {own[0].size} processes on this host, got {len(own)} of them (on several hosts: "
            "torchrun --max-restarts N)"
        ).on_all_ranks()
