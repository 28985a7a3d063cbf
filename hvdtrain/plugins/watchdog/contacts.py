"""How the watchdogs of a job find each other."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hvdtrain.plugins.watchdog.heartbeats import Contact, Heartbeats
from hvdtrain.plugins.watchdog.peers import LOOPBACK, Address, RankProcess, network, open_datagrams


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
    contact = Contact(
        socket.gethostname(), RankProcess.of_pid(os.getpid()), tuple(names), port, secrets.token_hex() if rank == 0 else ""
    )
    contacts: list[Contact] = gather(contact)
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
