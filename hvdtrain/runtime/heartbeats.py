"""Who hangs: the ranks' watchdogs tell each other over UDP what their ranks do, also while a collective waits.

Every rank sends rank 0 a datagram about once a second, and rank 0 answers with what it concludes from all of them. A datagram
needs no connection: a rank that is stopped blocks nobody, and a lost one is followed by the next. Where none gets through, each
rank judges by what it knows itself.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hvdtrain.runtime.peers import (
    LOOPBACK,
    Address,
    Datagrams,
    Process,
    authenticated,
    body_of,
    end_daemon_later,
    network,
    open_datagrams,
)

INTERVAL = 1.0
"""Seconds between two datagrams of a rank, in a job of up to MANY ranks; more in a larger one, so that rank 0 keeps up."""

MANY = 200

SILENT = 5.0
"""A rank of which nothing has been heard for this many seconds (or this many of its intervals) gives no sign of life."""

SECONDS_FOR_LAUNCHERS = 3.0
"""How long a rank waits for one that has ended. Most launchers, and most transports, end it sooner; srun with MPI does not."""

SECONDS_FOR_DAEMONS = 10.0
"""How long mpirun has to end a job that hangs."""

SHOWN = 16
"""How many ranks a message names, at most."""

STACK_SIGNAL = signal.SIGRTMIN + 7
"""On this signal, a process under a watchdog prints its stack: also if it holds Python's lock, so that no thread can do it."""

ENDED, FAILED = "ended", "failed"
"""What a rank sends that ends in an orderly way, or because of an error."""


@dataclass(frozen=True)
class Contact:
    """A rank as the others know it.

    Attributes:
        names: names and addresses of its host; 127.0.0.1 may be among them.
        port: where it listens; None: it cannot.
        token: a secret of the job, which authenticates its datagrams. Rank 0's is used.
    """

    host: str
    process: Process
    names: tuple[str, ...]
    port: int | None
    token: str


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life.

    Attributes:
        activity: what the rank does.
        idle: seconds since it last made progress.
        beats: how often it has made progress.
        waits: whether it waits for other ranks.
        overdue: whether it makes no progress for longer than its watchdog's patience.
    """

    activity: str
    idle: float
    beats: int
    waits: bool
    overdue: bool


@dataclass(frozen=True)
class Diagnosis:
    """Why the job makes no progress.

    Attributes:
        hanging: the ranks that wait for no other one.
        silent: the ranks that give no sign of life.
        gone: the ranks that have ended, or whose hosts are lost, while others wait for them.
        ends: no rank is waited for any longer.
    """

    hanging: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    ends: bool = False


def waits_long(sign: Heartbeat) -> bool:
    """Whether a rank has waited for others for so long that it will not get on if one of them has ended."""
    return sign.waits and sign.idle > SECONDS_FOR_LAUNCHERS


def diagnose(signs: Mapping[int, Heartbeat], silent: Collection[int], gone: Collection[int] = ()) -> Diagnosis | None:
    """Who hangs; None: no rank is overdue, and none waits for one that has ended.

    Ranks that have ended come first; then those that give no sign of life; then those that wait for no other rank, and of these
    the ones that are furthest behind, as GPUs let a rank run ahead of a collective. If all ranks wait, any of them may hang.

    Args:
        signs: by rank.
        silent: the ranks whose sign is old.
        gone: the ranks that have ended, or whose hosts are lost.

    >>> waits, works = Heartbeat("step 5", 20.0, 6, True, True), Heartbeat("step 5", 20.0, 6, False, False)
    >>> diagnose({0: waits, 1: works, 2: waits}, ()), diagnose({0: waits, 1: waits}, {1})
    (Diagnosis(hanging=(1,), silent=(), gone=(), ends=False), Diagnosis(hanging=(), silent=(1,), gone=(), ends=False))
    >>> diagnose({0: waits, 1: works}, (), {2}), diagnose({0: works, 1: works}, (), {2}) is None
    (Diagnosis(hanging=(), silent=(), gone=(2,), ends=True), True)
    """
    if gone and any(waits_long(sign) for rank, sign in signs.items() if rank not in gone):
        return Diagnosis(gone=tuple(sorted(gone)), ends=True)
    heard = {rank: sign for rank, sign in signs.items() if rank not in silent}
    if not any(sign.overdue for sign in heard.values()):
        return None
    if silent:
        return Diagnosis(silent=tuple(sorted(silent)))
    longest = max(sign.idle for sign in heard.values() if sign.overdue)
    working = {rank: sign for rank, sign in heard.items() if not sign.waits and sign.idle > longest / 2}
    fewest = min((sign.beats for sign in working.values()), default=0)
    hanging = [rank for rank, sign in sorted(working.items()) if sign.beats == fewest]
    return Diagnosis(tuple(hanging) or tuple(sorted(heard)))


@dataclass
class _Heard:
    """A rank of which something was heard. Attributes: sign: None of rank 0; at: when; address: from where."""

    sign: Heartbeat | None
    at: float
    address: Address


@dataclass
class Heartbeats:
    """What one rank's watchdog knows of the others. Without others, it knows itself.

    Only the watchdog's thread uses it, after it was made.

    Args:
        contacts: of all ranks, by rank.
        datagrams: None: there are no others, or they cannot be heard.
        addresses: where rank 0 may be reached from another rank.
        together: whether a rank ends if another one has ended; False: a launcher connects those that are left anew.
        restarts: whether the launcher starts the ranks again, so that they end if a host does not answer.
    """

    rank: int
    contacts: Sequence[Contact] = ()
    datagrams: Datagrams | None = None
    addresses: Sequence[Address] = ()
    together: bool = True
    restarts: bool = False
    _heard: dict[int, _Heard] = field(default_factory=dict)  # on rank 0 of all others, on the others of rank 0
    _ended: set[int] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)  # because of an error, or killed
    _lost: set[int] = field(default_factory=set)  # their hosts do not answer
    _answer: Diagnosis | None = None  # of rank 0, on the others
    _last_diagnosis: Diagnosis | None = None  # what rank 0 last told everyone
    _number_sent: int = 0
    _number_received: dict[int, int] = field(default_factory=dict)  # by rank: an old datagram, sent again, is no sign of life

    @property
    def interval(self) -> float:
        """Seconds between two datagrams."""
        return max(INTERVAL, INTERVAL * len(self.contacts) / MANY)

    @property
    def decides(self) -> bool:
        """Whether this rank judges: it is rank 0, or rank 0 is not heard."""
        return self.rank == 0 or 0 not in self._heard or 0 in self._gone or 0 in self._silent()

    def listen(self, seconds: float) -> None:
        """Take in what others send, for this long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.datagrams is None:
                time.sleep(left)
            elif (received := self.datagrams.receive(left)) is not None:
                self._take(*received)

    def _take(self, data: bytes, address: Address) -> None:
        # Nothing is parsed before it is known to be the job's own: whoever reaches the port could send what the parser chokes on.
        if (body := body_of(self.contacts[0].token, data)) is None:
            return
        sender, number, what = json.loads(body)
        # What a stranger has recorded may come once more, or to another rank: rank 0 hears all others, which hear rank 0.
        if number <= self._number_received.get(sender, 0) or (sender == 0) == (self.rank == 0):
            return
        self._number_received[sender] = number
        if what == ENDED:
            self._heard.pop(sender, None)
            self._ended.add(sender)
        elif what == FAILED:
            self._gone.add(sender)
        elif self.rank == 0:
            self._heard[sender] = _Heard(Heartbeat(**what), time.monotonic(), address)
            self._send(self._last_diagnosis and asdict(self._last_diagnosis), address)
        else:
            self._heard[0] = _Heard(None, time.monotonic(), address)
            self._answer = what and Diagnosis(tuple(what["hanging"]), tuple(what["silent"]), tuple(what["gone"]), what["ends"])

    def tell(self, sign: Heartbeat | str) -> None:
        """Send rank 0 a sign of life, or ENDED or FAILED, of which rank 0 tells the others."""
        what = sign if isinstance(sign, str) else asdict(sign)
        if self.rank == 0:
            for heard in list(self._heard.values()) if isinstance(sign, str) else ():
                self._send(what, heard.address)
            return
        for address in [self._heard[0].address] if 0 in self._heard.keys() - self._silent() else self.addresses:
            self._send(what, address)

    def _send(self, what: object, address: Address) -> None:
        if self.datagrams is not None:
            self._number_sent += 1
            body = json.dumps([self.rank, self._number_sent, what]).encode()
            self.datagrams.send(authenticated(self.contacts[0].token, body), address)

    def close(self) -> None:
        """Close the socket."""
        if self.datagrams is not None:
            self.datagrams.close()

    def conclude(self, own: Heartbeat) -> Diagnosis | None:
        """Why the job makes no progress, as far as it is known here; None: it makes progress."""
        self._look_for_lost()
        if not self.decides:
            return self._answer
        self._look_for_gone()
        # Ranks end in an orderly way once all of them are about to: who is slower then waits for nobody.
        in_vain = self.together and not self._ended
        return diagnose(self._heartbeats_of(own), self._silent(), self._gone | self._lost if in_vain else ())

    def _look_for_gone(self) -> None:
        """Find out which ranks have ended without a word: those of this host have no process any more, and of silent ones
        elsewhere their hosts say that nobody listens on their ports.
        """
        others = set(self._here()) - {self.rank} - self._ended
        self._gone |= {rank for rank in others if self.contacts[rank].process.has_ended()}
        if self.datagrams is None:
            return
        for rank in self._silent() & self._heard.keys() - self._gone:
            heard = self._heard[rank]
            if self.datagrams.refused.get(heard.address, -math.inf) > heard.at:
                self._gone.add(rank)
            else:
                self.datagrams.probe(heard.address)

    def wait_for_ended(self, seconds: float) -> list[str]:
        """Which ranks have ended, after a collective has failed because of one; waits until there is one, for so long at most.

        Unlike the other methods, this one is for any thread, while the watchdog's receives what the hosts answer.
        """
        began = time.monotonic()
        while True:
            found = self._gone | {rank for rank in self._here() if self.contacts[rank].process.has_ended()}
            for rank, heard in list(self._heard.items()):
                if self.datagrams is not None:
                    found |= {rank} if self.datagrams.refused.get(heard.address, -math.inf) > began else set()
                    self.datagrams.probe(heard.address)
            if found - self._ended or time.monotonic() - began > seconds:
                return [self._has_ended(rank) for rank in sorted(found - self._ended)][:SHOWN]
            time.sleep(0.05)

    def _has_ended(self, rank: int) -> str:
        return f"rank {rank} on {self.contacts[rank].host} has ended"

    def _look_for_lost(self) -> None:
        """Find out which silent ranks are on hosts that do not answer any more.

        All hosts are asked at the start, when their ranks are heard, since behind a firewall they may never answer. Of the ranks
        of this host only the first one asks: other kernels limit how often they answer it.
        """
        self._lost = set()
        if self.datagrams is None or not self.restarts or self.rank != self._here()[0]:
            return
        ranks: dict[str, set[int]] = defaultdict(set)
        for rank in self._heard.keys() - self._gone:
            ranks[self._heard[rank].address[0]].add(rank)
        silent = self._silent()
        for name, there in ranks.items():
            host = self.datagrams.hosts[name]
            if host.answers and not there <= silent:
                host.asked = 0
            else:
                self.datagrams.ask(name)
            if host.is_lost:
                self._lost |= there

    def broadcast(self, diagnosis: Diagnosis | None) -> None:
        """On rank 0: tell the others the diagnosis, at once and with every answer from now on."""
        self._last_diagnosis = diagnosis
        for heard in self._heard.values() if self.rank == 0 else ():
            self._send(diagnosis and asdict(diagnosis), heard.address)

    def _heartbeats_of(self, own: Heartbeat) -> dict[int, Heartbeat]:
        """By rank, what is known now."""
        now = time.monotonic()
        heard = {rank: (one.sign, now - one.at) for rank, one in self._heard.items()}
        return {self.rank: own} | {rank: replace(sign, idle=sign.idle + age) for rank, (sign, age) in heard.items() if sign}

    def _silent(self) -> set[int]:
        now = time.monotonic()
        silent = {rank for rank, heard in self._heard.items() if now - heard.at > SILENT * self.interval}
        if self.rank != 0:
            return silent
        unheard = set(self._here()) - {0} - self._heard.keys() - self._ended
        return silent | {rank for rank in unheard if self.contacts[rank].process.describe()}

    def forgive(self) -> None:
        """After this process was suspended, it can't tell for how long others have been silent."""
        for heard in self._heard.values():
            heard.at = time.monotonic()

    def describe(self, diagnosis: Diagnosis, own: Heartbeat) -> str | None:
        """The diagnosis in words; None: there is nothing to say beside what the ranks say of themselves."""
        if len(self.contacts) < 2 or (not diagnosis.silent and not diagnosis.gone and (self.rank != 0 or not self._heard)):
            return None
        if diagnosis.gone:
            ended = [self._has_ended(rank) for rank in diagnosis.gone if rank not in self._lost]
            them = "it" if len(diagnosis.gone) == 1 else "them"
            return f"{'; '.join([*ended[:SHOWN], *self._of_lost()])}: the other ranks wait for {them} in vain, and end, too"
        signs = self._heartbeats_of(own)
        if diagnosis.silent:
            return "; ".join(self._of_silent(rank) for rank in diagnosis.silent[:SHOWN])
        waiting = [rank for rank in signs if rank not in diagnosis.hanging]
        if not waiting and all(signs[rank].waits for rank in diagnosis.hanging if rank in signs):
            each = "; ".join(
                f"rank {rank}: {sign.activity}, for {sign.idle:.0f} s" for rank, sign in sorted(signs.items())[:SHOWN]
            )
            return f"every rank waits for others: was a connection lost, or do they call different collectives? {each}"
        text = "; ".join(
            f"rank {rank} on {self.contacts[rank].host} hangs: no progress for {signs[rank].idle:.0f} s (watchdog_timeout) "
            f"in {signs[rank].activity}"
            for rank in diagnosis.hanging[:SHOWN]
        )
        others = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
        unknown = [str(rank) for rank in range(len(self.contacts)) if rank not in signs]
        unheard = f"; nothing was heard of rank {', '.join(unknown[:SHOWN])}" if unknown else ""
        return text + (f"; {others} for {'it' if len(diagnosis.hanging) == 1 else 'them'}" if waiting else "") + unheard

    def _of_lost(self) -> Iterator[str]:
        for host in sorted({self.contacts[rank].host for rank in self._lost})[:SHOWN]:
            there = [rank for rank, contact in enumerate(self.contacts) if contact.host == host]
            seconds = time.monotonic() - max(self._heard[rank].at for rank in there if rank in self._lost)
            ranks = f"rank{'s' if len(there) > 1 else ''} {', '.join(map(str, there[:SHOWN]))}"
            yield f"{host} with {ranks} has not answered for {seconds:.0f} s, so its power or its network is lost"

    def _of_silent(self, rank: int) -> str:
        contact = self.contacts[rank]
        heard = self._heard.get(rank)
        since = "" if heard is None else f" for {time.monotonic() - heard.at:.0f} s"
        last = "" if heard is None or heard.sign is None else f" (last in {heard.sign.activity})"
        text = f"rank {rank} on {contact.host} has given no sign of life{since}{last}: its process {contact.process.pid}"
        if not self._sees(rank):
            return f"{text} is stopped, or its host or network is lost"
        return f"{text} {contact.process.describe() or 'runs, but holds the lock of its Python'}"

    def _sees(self, rank: int) -> bool:
        """Whether a rank's process is on this host."""
        one, own = self.contacts[rank], self.contacts[self.rank]
        return (one.host, one.process.place) == (own.host, own.process.place)

    def _here(self) -> list[int]:
        """The ranks of this host."""
        return [rank for rank in range(len(self.contacts)) if self._sees(rank)]

    def ask_for_stacks(self, silent: Collection[int]) -> None:
        """Make silent ranks of this host print their stacks; of several ranks that could ask, the first one does."""
        here = self._here()
        if self.rank == next((rank for rank in here if rank not in silent), None):
            for rank in set(here) & set(silent):
                if self.contacts[rank].process.state() in ("R", "S", "D"):
                    self.contacts[rank].process.send(STACK_SIGNAL)

    def kill(self, silent: Collection[int]) -> None:
        """End silent ranks of this host: a launcher asks them first, and waits in vain if they are stopped.

        Those of another host are the launcher's to end. If that host is lost, mpirun waits for it in vain.
        """
        for rank in silent:
            if self._sees(rank) and rank != self.rank:
                self.contacts[rank].process.send(signal.SIGKILL)
        if not all(self._sees(rank) for rank in silent):
            end_daemon_later(SECONDS_FOR_DAEMONS)


def exchange_contacts(
    rank: int, names: Sequence[str], gather: Callable[[Any], list[Any]], together: bool = True, restarts: bool = False
) -> Heartbeats:
    """Collective. Exchange addresses with the watchdogs of the other ranks.

    Where all ranks are on one host, they listen on its loopback address, which no other host reaches.

    Args:
        names: names and addresses of this host.
        gather: gives every rank's value, by rank.
        together, restarts: see `Heartbeats`.
    """
    on_one_host = len(set(gather(network()))) == 1
    datagrams = open_datagrams(LOOPBACK if on_one_host else "")
    port = None if datagrams is None else datagrams.port
    own = Contact(socket.gethostname(), Process.of(os.getpid()), tuple(names), port, secrets.token_hex())
    contacts: list[Contact] = gather(own)
    if datagrams is not None and contacts[0].port is None:
        datagrams.close()
        datagrams = None
    met = Heartbeats(rank, contacts, datagrams, together=together, restarts=restarts)
    if rank != 0:
        met.addresses = _addresses(contacts[0], local=on_one_host or 0 in met._here())
    return met


def _addresses(contact: Contact, local: bool) -> list[Address]:
    """Where a rank may be reached. Names are looked up here, once: without a name server, that takes many seconds."""
    found = []
    for name in (LOOPBACK,) if local else [name for name in contact.names if not name.startswith("127.")]:
        with suppress(OSError):
            found.append((socket.gethostbyname(name), contact.port or 0))
    return list(dict.fromkeys(found))
