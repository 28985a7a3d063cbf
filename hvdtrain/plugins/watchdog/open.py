"""The watchdog of a job's rank, connected to those of the other ranks."""

from __future__ import annotations

import threading
from functools import partial
from math import inf
from pathlib import Path

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator
from hvdtrain.comm.torch_rendezvous import names_of_this_host
from hvdtrain.plugins.watchdog.contacts import exchange_contacts
from hvdtrain.plugins.watchdog.keys import WatchdogKeys
from hvdtrain.plugins.watchdog.relays import Layout
from hvdtrain.plugins.watchdog.watchdog import Ending, JobWatchdog
from hvdtrain.report.ends import append_end
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.settings import Settings

SECONDS_TO_WRITE = 1.0
"""How long a process that ends itself waits for its record: the file system may be what hangs."""


def open_watchdog(settings: Settings, comm: Communicator, purpose: str) -> Watchdog:
    """Collective. The watchdog of this rank, which starts when it is entered."""
    timeout = settings.of(WatchdogKeys).watchdog_timeout
    # Measurements have deadlines. A single rank in a program's process blocks no other one, and may be paused in a debugger.
    is_unwatched = purpose == "measure" or (comm.size == 1 and not settings.process.is_own and timeout is None)
    launcher = this_process.launcher()
    heartbeats = None
    if comm.size > 1 and purpose != "measure":
        heartbeats = exchange_contacts(
            comm.rank,
            names_of_this_host() if Layout.of(comm.size).is_hub(comm.rank) else (),
            lambda value: comm.gather(value, name="watchdog"),
            together=launcher.restarts != "lost ranks",
            restarts=launcher.restarts == "all ranks",
        )
    ending = Ending(launcher.hung_status, launcher.peer_status, launcher.outlives)
    watchdog = JobWatchdog(inf if is_unwatched else timeout, comm.rank, heartbeats, ending, settings.process.is_own)
    if purpose == "train":
        watchdog.record = partial(append_hang, settings.records, comm.rank)
    return watchdog


def append_hang(folder: Path, rank: int, why: str, is_consequence: bool) -> None:
    """Record that a watchdog ends the job, within a time limit."""
    write = partial(append_end, folder, "failed", why, f"the watchdog of rank {rank}", is_consequence=is_consequence)
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(SECONDS_TO_WRITE)
