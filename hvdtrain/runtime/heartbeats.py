"""Who hangs: the ranks' watchdogs tell each other over UDP what their ranks do, also while a collective waits.

Every rank sends rank 0 a datagram about once a second, and rank 0 answers with what it concludes from all of them. A datagram
needs no connection: a rank that is stopped blocks nobody, and a lost one is followed by the next. Where none gets through, each
rank judges by what it knows itself.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from hvdtrain.runtime.processes import Process, end_daemon_later

INTERVAL = 1.0
"""Seconds between two datagrams of a rank, in a job of up to MANY ranks; more in a larger one, so that rank 0 keeps up."""

MANY = 200

SILENT = 5.0
"""A rank of which nothing has been heard for this many seconds (or this many of its intervals) gives no sign of life."""

SECONDS_FOR_LAUNCHERS = 3.0
"""How long a rank waits for one that has ended. Most launchers, and most transports, end it sooner; srun with MPI does not."""

SECONDS_TO_REFUSE = 0.05
"""How long a host has to say that nobody listens on a port."""

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
        token: what every datagram of the job begins with. Rank 0's is used.
    """

    host: str
    process: Process
    names: tuple[str, ...]
    port: int | None
    token: str


@dataclass(frozen=True)
class Sign:
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
class Verdict:
    """Why the job makes no progress.

    Attributes:
        hanging: the ranks that wait for no other one.
        silent: the ranks that give no sign of life.
        gone: the ranks that have ended while others wait for them.
        ends: no rank is waited for any longer.
    """

    hanging: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    ends: bool = False


def waits_long(sign: Sign) -> bool:
    """Whether a rank has waited for others for so long that it will not get on if one of them has ended."""
    return sign.waits and sign.idle > SECONDS_FOR_LAUNCHERS


def judge(signs: Mapping[int, Sign], silent: Collection[int], gone: Collection[int] = ()) -> Verdict | None:
    """Who hangs; None: no rank is overdue, and none waits for one that has ended.

    Ranks that have ended come first; then those that give no sign of life; then those that wait for no other rank, and of these
    the ones that are furthest behind, as GPUs let a rank run ahead of a collective. If all ranks wait, any of them may hang.

    Args:
        signs: by rank.
        silent: the ranks whose sign is old.
        gone: the ranks that have ended.

    >>> waits, works = Sign("step 5", 20.0, 6, True, True), Sign("step 5", 20.0, 6, False, False)
    >>> judge({0: waits, 1: works, 2: waits}, ()), judge({0: waits, 1: waits}, {1})
    (Verdict(hanging=(1,), silent=(), gone=(), ends=False), Verdict(hanging=(), silent=(1,), gone=(), ends=False))
    >>> judge({0: waits, 1: works}, (), {2}), judge({0: works, 1: works}, (), {2}) is None
    (Verdict(hanging=(), silent=(), gone=(2,), ends=True), True)
    """
    if gone and any(waits_long(sign) for sign in signs.values()):
        return Verdict(gone=tuple(sorted(gone)), ends=True)
    heard = {rank: sign for rank, sign in signs.items() if rank not in silent}
    if not any(sign.overdue for sign in heard.values()):
        return None
    if silent:
        return Verdict(silent=tuple(sorted(silent)))
    longest = max(sign.idle for sign in heard.values() if sign.overdue)
    working = {rank: sign for rank, sign in heard.items() if not sign.waits and sign.idle > longest / 2}
    fewest = min((sign.beats for sign in working.values()), default=0)
    hanging = [rank for rank, sign in sorted(working.items()) if sign.beats == fewest]
    return Verdict(tuple(hanging) or tuple(sorted(heard)))


@dataclass
class _Heard:
    """What rank 0 knows of another rank. Attributes: at: when it was heard; address: from where."""

    sign: Sign
    at: float
    address: tuple[str, int]


@dataclass
class Heartbeats:
    """What one rank's watchdog knows of the others. Without others, it knows itself.

    Only the watchdog's thread uses it, after it was made.

    Args:
        contacts: of all ranks, by rank.
        udp: the socket; None: there are no others, or they cannot be heard.
        together: whether a rank ends if another one has ended; False: a launcher connects those that are left anew.
    """

    rank: int
    contacts: Sequence[Contact] = ()
    udp: socket.socket | None = None
    together: bool = True
    _heard: dict[int, _Heard] = field(default_factory=dict)  # on rank 0
    _ended: set[int] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)  # because of an error, or killed
    _answered: float | None = None  # when rank 0 was last heard, on the others
    _answer: Verdict | None = None
    _addresses: list[tuple[str, int]] = field(default_factory=list)  # of rank 0, the one that answered alone once one has
    _told: Verdict | None = None  # what rank 0 last told everyone

    @property
    def interval(self) -> float:
        """Seconds between two datagrams."""
        return max(INTERVAL, INTERVAL * len(self.contacts) / MANY)

    @property
    def decides(self) -> bool:
        """Whether this rank judges: it is rank 0, or rank 0 is not heard."""
        return self.rank == 0 or self.udp is None or self._answered is None or 0 in self._gone or self._rank_0_is_silent()

    def _rank_0_is_silent(self) -> bool:
        return self._answered is not None and time.monotonic() - self._answered > SILENT * self.interval

    def listen(self, seconds: float) -> None:
        """Take in what others send, for this long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.udp is None:
                time.sleep(left)
                return
            self.udp.settimeout(max(left, 0.001))
            try:
                self._take(*self.udp.recvfrom(65536))
            except TimeoutError:
                return
            except OSError:  # such as a port that nobody listens on
                time.sleep(0.01)

    def _take(self, data: bytes, address: tuple[str, int]) -> None:
        try:
            token, sender, what = json.loads(data)
            if token != self.contacts[0].token:
                return
            if self.rank == 0 and what == ENDED:
                self._heard.pop(sender, None)
                self._ended.add(sender)
            elif what == FAILED and sender != self.rank:
                self._gone.add(sender)
            elif self.rank == 0:
                self._heard[sender] = _Heard(Sign(**what), time.monotonic(), address)
                self._send(self._told and asdict(self._told), address)
            elif what == ENDED:
                self._answered, self._answer = None, None
            else:
                self._answered, self._addresses = time.monotonic(), [address]
                self._answer = what and Verdict(tuple(what["hanging"]), tuple(what["silent"]), tuple(what["gone"]), what["ends"])
        except (ValueError, TypeError, KeyError, IndexError):  # of somebody else
            return

    def tell(self, sign: Sign | str) -> None:
        """Send rank 0 a sign of life, or ENDED or FAILED, of which rank 0 tells the others."""
        what = sign if isinstance(sign, str) else asdict(sign)
        if self.rank == 0:
            for heard in list(self._heard.values()) if isinstance(sign, str) else ():
                self._send(what, heard.address)
            return
        if self.udp is None:
            return
        if not self._addresses or self._rank_0_is_silent():
            self._addresses = list(self._addresses_of_rank_0())
        for address in self._addresses:
            self._send(what, address)

    def _addresses_of_rank_0(self) -> Iterator[tuple[str, int]]:
        first = self.contacts[0]
        for name in ("127.0.0.1",) if self._sees(0) else [name for name in first.names if not name.startswith("127.")]:
            with suppress(OSError):
                yield socket.gethostbyname(name), first.port or 0

    def _send(self, what: object, address: tuple[str, int]) -> None:
        if self.udp is not None:
            with suppress(OSError):
                self.udp.sendto(json.dumps([self.contacts[0].token, self.rank, what]).encode(), address)

    def close(self) -> None:
        """Close the socket."""
        if self.udp is not None:
            self.udp.close()

    def conclude(self, own: Sign) -> Verdict | None:
        """Why the job makes no progress, as far as it is known here; None: it makes progress."""
        if not self.decides:
            return self._answer
        self._look_for_gone()
        gone = self._gone if self.together else ()
        if self.rank == 0:
            return judge(self._signs(own), self._silent(), gone)
        if self._rank_0_is_silent() and own.overdue and 0 not in gone:
            return Verdict(silent=(0,))
        return judge({self.rank: own}, (), gone)

    def _look_for_gone(self) -> None:
        """Find out which silent ranks have ended without a word: their hosts answer that nobody listens any more."""
        if self.rank == 0:
            for rank in sorted(self._silent() & self._heard.keys() - self._gone)[:SHOWN]:
                if _refused(self._heard[rank].address):
                    self._gone.add(rank)
        elif 0 not in self._gone and self._rank_0_is_silent() and len(self._addresses) == 1 and _refused(self._addresses[0]):
            self._gone.add(0)

    def tell_all(self, verdict: Verdict | None) -> None:
        """On rank 0: tell the others the verdict, at once and with every answer from now on."""
        self._told = verdict
        for heard in self._heard.values():
            self._send(verdict and asdict(verdict), heard.address)

    def _signs(self, own: Sign) -> dict[int, Sign]:
        """By rank, what is known now."""
        now = time.monotonic()
        others = {rank: replace(heard.sign, idle=heard.sign.idle + now - heard.at) for rank, heard in self._heard.items()}
        return {self.rank: own} | others

    def _silent(self) -> set[int]:
        now = time.monotonic()
        silent = {rank for rank, heard in self._heard.items() if now - heard.at > SILENT * self.interval}
        unheard = [rank for rank in range(1, len(self.contacts)) if rank not in self._heard and rank not in self._ended]
        return silent | {rank for rank in unheard if self._sees(rank) and self.contacts[rank].process.describe()}

    def forgive(self) -> None:
        """After this process was suspended, it can't tell for how long others have been silent."""
        for heard in self._heard.values():
            heard.at = time.monotonic()
        if self._answered is not None:
            self._answered = time.monotonic()

    def describe(self, verdict: Verdict, own: Sign) -> str | None:
        """The verdict in words; None: there is nothing to say beside what the ranks say of themselves."""
        if len(self.contacts) < 2 or (not verdict.silent and not verdict.gone and (self.rank != 0 or not self._heard)):
            return None
        if verdict.gone:
            return "; ".join(f"rank {rank} on {self.contacts[rank].host} has ended" for rank in verdict.gone[:SHOWN]) + (
                f": the other ranks wait for {'it' if len(verdict.gone) == 1 else 'them'} in vain, and end, too"
            )
        signs = self._signs(own)
        if verdict.silent:
            return "; ".join(self._of_silent(rank) for rank in verdict.silent[:SHOWN])
        waiting = [rank for rank in signs if rank not in verdict.hanging]
        if not waiting and all(signs[rank].waits for rank in verdict.hanging if rank in signs):
            each = "; ".join(
                f"rank {rank}: {sign.activity}, for {sign.idle:.0f} s" for rank, sign in sorted(signs.items())[:SHOWN]
            )
            return f"every rank waits for others: was a connection lost, or do they call different collectives? {each}"
        text = "; ".join(
            f"rank {rank} on {self.contacts[rank].host} hangs: no progress for {signs[rank].idle:.0f} s (watchdog_timeout) "
            f"in {signs[rank].activity}"
            for rank in verdict.hanging[:SHOWN]
        )
        others = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
        unknown = [str(rank) for rank in range(len(self.contacts)) if rank not in signs]
        unheard = f"; nothing was heard of rank {', '.join(unknown[:SHOWN])}" if unknown else ""
        return text + (f"; {others} for {'it' if len(verdict.hanging) == 1 else 'them'}" if waiting else "") + unheard

    def _of_silent(self, rank: int) -> str:
        contact = self.contacts[rank]
        heard = self._heard.get(rank)
        at = heard.at if heard else self._answered
        since = "" if at is None else f" for {time.monotonic() - at:.0f} s"
        last = f" (last in {heard.sign.activity})" if heard else ""
        text = f"rank {rank} on {contact.host} has given no sign of life{since}{last}: its process {contact.process.pid}"
        if not self._sees(rank):
            return f"{text} is stopped, or its host or network is lost"
        return f"{text} {contact.process.describe() or 'runs, but holds the lock of its Python'}"

    def _sees(self, rank: int) -> bool:
        """Whether a rank's process is on this host."""
        one, own = self.contacts[rank], self.contacts[self.rank]
        return (one.host, one.process.place) == (own.host, own.process.place)

    def ask_for_stacks(self, silent: Collection[int]) -> None:
        """Make silent ranks of this host print their stacks; of several ranks that could ask, the first one does."""
        for rank in silent:
            here = [
                other for other in range(len(self.contacts)) if other not in silent and self._sees(rank) and self._sees(other)
            ]
            if here and here[0] == self.rank and self.contacts[rank].process.state() in ("R", "S", "D"):
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


def meet(rank: int, names: Sequence[str], gather: Callable[[Contact], list[Contact]], together: bool = True) -> Heartbeats:
    """Collective. Exchange addresses with the watchdogs of the other ranks.

    Args:
        names: names and addresses of this host.
        gather: gives every rank's value, by rank.
        together: see `Heartbeats`.
    """
    udp = _socket()
    port = None if udp is None else udp.getsockname()[1]
    contacts = gather(Contact(socket.gethostname(), Process.of(os.getpid()), tuple(names), port, secrets.token_hex(8)))
    if udp is not None and contacts[0].port is None:
        udp.close()
        udp = None
    return Heartbeats(rank, contacts, udp, together)


def _refused(address: tuple[str, int]) -> bool:
    """Whether a host says that nobody listens on a port. A process that is stopped still does, and a lost host says nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(SECONDS_TO_REFUSE)
        probe.connect(address)
        probe.send(b"null")  # which `_take` ignores
        try:
            probe.recv(1)
        except ConnectionRefusedError:
            return True
    return False


def _socket() -> socket.socket | None:
    try:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("", 0))
        return udp
    except OSError:  # a host without IPv4
        return None
