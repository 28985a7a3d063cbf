"""The watchdog of a job's rank, and how it finds those of the other ranks."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator
from hvdtrain.comm.torch_rendezvous import names_of_this_host
from hvdtrain.plugins.watchdog import WatchdogKeys
from hvdtrain.plugins.watchdog.heartbeats import Contact, Heartbeats
from hvdtrain.plugins.watchdog.peers import LOOPBACK, Address, RankProcess, network, open_datagrams
from hvdtrain.plugins.watchdog.relays import Layout
from hvdtrain.plugins.watchdog.watchdog import JobWatchdog
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
    watchdog = JobWatchdog(inf if is_unwatched else timeout, comm.rank, heartbeats, launcher, settings.process.is_own)
    if purpose == "train":
        watchdog.record = partial(append_hang, settings.records, comm.rank)
    return watchdog


def append_hang(folder: Path, rank: int, why: str, is_consequence: bool) -> None:
    """Record that a watchdog ends the job, within a time limit."""
    write = partial(append_end, folder, "failed", why, f"the watchdog of rank {rank}", is_consequence=is_consequence)
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(SECONDS_TO_WRITE)


def exchange_contacts(
    rank: int, names: Sequence[str], gather: Callable[[Any], list[Any]], together: bool = True, restarts: bool = False
) -> Heartbeats:
    """Collective. Exchange addresses with the watchdogs of the other ranks.

    If all ranks are on one host, they listen on its loopback address, which other hosts cannot reach.

    Args:
        names: names and addresses of this host, on the ranks that others send heartbeats to (`Layout.is_hub`).
        gather: returns the values of all ranks, by rank.
        together, restarts: see `Heartbeats`.
    """
    on_one_host = len(set(gather(network()))) == 1
    datagrams = open_datagrams(LOOPBACK if on_one_host else "")
    port = None if datagrams is None else datagrams.port
    token = secrets.token_hex() if rank == 0 else ""
    contacts: list[Contact] = gather(Contact(socket.gethostname(), RankProcess.of_pid(os.getpid()), tuple(names), port, token))
    if datagrams is not None and contacts[0].port is None:
        datagrams.close()
        datagrams = None
    heartbeats = Heartbeats(rank, contacts, datagrams, together=together, restarts=restarts)
    hub = heartbeats.hub
    if rank != 0:
        heartbeats.addresses = _addresses(contacts[0], local=on_one_host or heartbeats.is_local(0))
    if hub not in (0, rank):
        heartbeats.hub_addresses = _addresses(contacts[hub], local=on_one_host or heartbeats.is_local(hub))
    return heartbeats


def _addresses(contact: Contact, local: bool) -> list[Address]:
    """Addresses at which a rank may be reached. Names are looked up only here: without a name server, a lookup takes seconds."""
    addresses = []
    for name in (LOOPBACK,) if local else [name for name in contact.names if not name.startswith("127.")]:
        with suppress(OSError):
            addresses.append((socket.gethostbyname(name), contact.port or 0))
    return list(dict.fromkeys(addresses))
