"""What is said and done about ranks that hang, have ended or do not answer."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterator

from hvdtrain.plugins.watchdog.diagnosis import Diagnosis, Heartbeat
from hvdtrain.plugins.watchdog.heartbeats import SHOWN, Heartbeats
from hvdtrain.plugins.watchdog.peers import end_daemon_later

SECONDS_FOR_DAEMONS = 10.0
"""How long mpirun has to end a job that hangs."""

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Makes a process under a watchdog print its stack, even if it holds the GIL, so that no Python thread could."""


def describe(heartbeats: Heartbeats, diagnosis: Diagnosis, heartbeat: Heartbeat) -> str | None:
    """The diagnosis in words; None: the hanging ranks report everything themselves."""
    if len(heartbeats.contacts) < 2 or (
        not diagnosis.silent and not diagnosis.gone and (heartbeats.rank != 0 or not heartbeats.last)
    ):
        return None
    if diagnosis.gone:
        ended = [heartbeats.ended_line(rank) for rank in diagnosis.gone if rank not in heartbeats.lost]
        them = "it" if len(diagnosis.gone) == 1 else "them"
        lines = [*ended[:SHOWN], *_lost_host_lines(heartbeats)]
        return f"{'; '.join(lines)}: the remaining ranks are blocked on {them} and will exit"
    if diagnosis.silent:
        return "; ".join(_silent_line(heartbeats, rank) for rank in diagnosis.silent[:SHOWN])
    by_rank = heartbeats.heartbeats(heartbeat)
    waiting = [rank for rank in by_rank if rank not in diagnosis.hanging]
    if not waiting and all(by_rank[rank].waits for rank in diagnosis.hanging if rank in by_rank):
        activities = "; ".join(
            f"rank {rank}: {last.activity}, for {last.idle:.0f} s" for rank, last in sorted(by_rank.items())[:SHOWN]
        )
        return f"every rank waits for others: was a connection lost, or do they call different collectives? {activities}"
    text = "; ".join(
        f"rank {rank} on {heartbeats.contacts[rank].host} hangs: no progress for {by_rank[rank].idle:.0f} s (watchdog_timeout) "
        f"in {by_rank[rank].activity}"
        for rank in diagnosis.hanging[:SHOWN]
    )
    others = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    unknown = [str(rank) for rank in range(len(heartbeats.contacts)) if rank not in by_rank]
    unheard = f"; no heartbeat from rank {', '.join(unknown[:SHOWN])}" if unknown else ""
    return text + (f"; {others} for {'it' if len(diagnosis.hanging) == 1 else 'them'}" if waiting else "") + unheard


def _lost_host_lines(heartbeats: Heartbeats) -> Iterator[str]:
    for host in sorted({heartbeats.contacts[rank].host for rank in heartbeats.lost})[:SHOWN]:
        ranks = [rank for rank, contact in enumerate(heartbeats.contacts) if contact.host == host]
        heard = [heartbeats.last[rank].received_at for rank in ranks if rank in heartbeats.lost and rank in heartbeats.last]
        seconds = time.monotonic() - max(heard, default=heartbeats.began)
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:SHOWN]))}"
        yield f"{host} with {names} has not answered for {seconds:.0f} s, so it has lost power or its network connection"


def _silent_line(heartbeats: Heartbeats, rank: int) -> str:
    contact = heartbeats.contacts[rank]
    last = heartbeats.last.get(rank)
    since = "" if last is None else f" for {time.monotonic() - last.received_at:.0f} s"
    activity = "" if last is None or last.heartbeat is None else f" (last in {last.heartbeat.activity})"
    text = f"rank {rank} on {contact.host} has sent no heartbeat{since}{activity}: its process {contact.process.pid}"
    if not heartbeats.is_local(rank):
        return f"{text} is stopped, or its host or network is down"
    return f"{text} {contact.process.describe() or 'is running, but does not release the GIL'}"


def request_stacks(heartbeats: Heartbeats, silent: Collection[int]) -> bool:
    """Make silent ranks of this host print their stacks. Only the first rank of the host that is not silent does so.

    Returns:
        whether there are such ranks, which every rank of the host has to give time.
    """
    running = [
        rank for rank in heartbeats.local if rank in silent and heartbeats.contacts[rank].process.state() in ("R", "S", "D")
    ]
    if heartbeats.rank == next((rank for rank in heartbeats.local if rank not in silent), None):
        for rank in running:
            heartbeats.contacts[rank].process.send(STACK_SIGNAL)
    return bool(running)


def kill(heartbeats: Heartbeats, silent: Collection[int]) -> None:
    """Kill the silent ranks of this host: a launcher would ask a stopped process to end, and never get an answer.

    Those of other hosts are left to the launcher. As mpirun never gives up on a lost host, its daemon is ended, too.
    """
    for rank in silent:
        if heartbeats.is_local(rank) and rank != heartbeats.rank:
            heartbeats.contacts[rank].process.send(signal.SIGKILL)
    if not all(heartbeats.is_local(rank) for rank in silent):
        end_daemon_later(SECONDS_FOR_DAEMONS)
