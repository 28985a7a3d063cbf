"""The rule by which hvdtrain's launcher restarts processes after a failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hvdtrain.comm.launchers import Place
from hvdtrain.plugins.local_ranks.processes import describe_end
from hvdtrain.plugins.local_ranks.reports import HUNG, PEER_FAILED


class Restarts:
    """Decides which processes of hvdtrain's launcher to restart after a failure.

    Processes are restarted only if a signal killed one (SIGKILL by a user, the batch system or the kernel, or a crash of native
    code), or if its watchdog ended it because it hung, for example in a file system or on a GPU that does not respond. A process
    that ends by itself, with a traceback or with any status, would most likely do so again. All processes are restarted, since
    none can continue without the others. With the same number of them, the training gives the same result as without a failure.

    If processes are killed again before a new checkpoint was written, one process fewer is started, where that is allowed: the
    host may not have enough memory for all. This is not the default, as it changes the number of batches per update.

    Args:
        most: the maximum number of restarts.
        fewest: the number of processes to which it may fall; None: it does not change.
        newest: returns the checkpoint from which a start continues, if there is one.
        record: called with the reason if the job ends because processes did not report why they ended.
    """

    def __init__(
        self,
        most: int,
        fewest: int | None,
        newest: Callable[[], Path | None],
        record: Callable[[str], object] = lambda why: None,
    ) -> None:
        self._most = most
        self._fewest = fewest
        self._newest = newest
        self._record = record
        self._count = 0
        self._at_last_start = newest() if most else None

    def __call__(self, places: list[Place], failed: Mapping[int, int]) -> list[Place]:
        """As `_next_places`; record why the job ends."""
        next_places = self._next_places(places, failed)
        ends = [(rank, describe_end(status, out_of_memory=False)) for rank, status in failed.items()]
        unexplained = [f"rank {rank} of {len(places)} {how}" for rank, how in ends if how is not None]
        if unexplained and not next_places:
            self._record("; ".join(unexplained))
        return next_places

    def _next_places(self, places: list[Place], failed: Mapping[int, int]) -> list[Place]:
        """Return the places of the processes to start in place of those that have ended; if empty, the job has failed.

        Args:
            failed: by rank, the exit statuses of those that failed by themselves, as in `subprocess`: negative after a signal.
        """
        killed = {rank: f"was ended by {signal.Signals(-status).name}" for rank, status in failed.items() if status < 0}
        lost = killed | {rank: "hung and was ended by its watchdog" for rank, status in failed.items() if status == HUNG}
        errors = [rank for rank, status in failed.items() if status >= 0 and status not in (PEER_FAILED, HUNG)]
        if errors or not lost or not self._most:
            return []
        causes = ", ".join(f"rank {rank} of {len(places)} {how}" for rank, how in lost.items())
        if self._count == self._most:
            sys.stderr.write(f"{causes}: no restart, after {self._count} of {self._most} (max_restarts)\n")
            return []
        newest = self._newest()
        size = len(places)
        if self._count and newest == self._at_last_start and self._fewest is not None and killed:
            size = max(self._fewest, size - 1)
        self._count += 1
        self._at_last_start = newest
        ranks = "1 rank continues" if size == 1 else f"{size} ranks continue"
        position = "from the beginning" if newest is None else f"from {newest}"
        fewer = ", as no checkpoint was written since the last restart (min_ngpu)" if size < len(places) else ""
        sys.stderr.write(f"restart {self._count} of {self._most}: {causes}; {ranks} {position}{fewer}\n")
        return [replace(place, size=size, local_size=size) for place in places[:size]]
