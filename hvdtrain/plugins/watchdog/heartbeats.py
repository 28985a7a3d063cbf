"""Which rank hangs: the watchdogs of all ranks exchange heartbeats over UDP, even while a collective blocks.

Every rank sends rank 0 a datagram about once a second, in large jobs through a relay (`relays.py`), and rank 0 replies with its
diagnosis of the whole job. Datagrams need no connection, so a stopped rank blocks no other one, and a lost datagram is made up
for by the next. Where none gets through, each rank makes its own diagnosis from what it can observe.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hvdtrain.plugins.watchdog.diagnosis import Diagnosis, Heartbeat, diagnose, values
from hvdtrain.plugins.watchdog.peers import Address, Datagrams, RankProcess, sign, verify
from hvdtrain.plugins.watchdog.relays import GroupReport, Layout

INTERVAL = 1.0
"""Seconds between two datagrams of a rank, if up to MANY ranks send to the same one; more with more, so that it keeps up."""

MANY = 200

SILENT = 5.0
"""A rank that has sent nothing for this many seconds (or this many of its intervals) is silent."""


SECONDS_OF_DETAILS = 10.0
"""How long relays report every rank behind them after rank 0 last needed that."""

SHOWN = 16
"""The most ranks that a message names."""

ENDED, FAILED = "ended", "failed"
"""The last message of a rank that ends in an orderly way, or because of an error."""


@dataclass(frozen=True)
class Contact:
    """What the other ranks need to know to watch this one.

    Attributes:
        names: names and addresses of its host; 127.0.0.1 may be among them.
        port: the port it listens on; None: it cannot listen.
        token: on rank 0, a secret of the job, which authenticates its datagrams.
    """

    host: str
    process: RankProcess
    names: tuple[str, ...]
    port: int | None
    token: str


@dataclass
class _LastDatagram:
    """The last datagram from a rank; a hub sends no heartbeat to those that send theirs to it.

    Attributes:
        address: None: a relay reported the rank.
    """

    heartbeat: Heartbeat | None
    received_at: float
    address: Address | None


@dataclass
class Heartbeats:
    """What one rank's watchdog knows about all ranks. In a job of one rank, it knows only itself.

    Once constructed, it is used by the watchdog's thread only.

    Args:
        contacts: of all ranks, by rank.
        datagrams: None: there are no other ranks, or they cannot be reached.
        addresses: addresses at which another rank may reach rank 0.
        together: whether a rank ends if another one has ended; False: a launcher reconnects the remaining ranks.
        restarts: whether the launcher restarts the ranks, so that they end if a host does not answer.
        hub_addresses: as `addresses`, of the rank to which this one sends its heartbeats, if that is a relay.
        layout: who sends heartbeats to whom; None: that of this number of ranks.

    Attributes:
        last: by sender, the last datagram; on rank 0 also from those that relays report.
        lost: the ranks whose hosts do not answer.
        began: the time by the clock.
    """

    rank: int
    contacts: Sequence[Contact] = ()
    datagrams: Datagrams | None = None
    addresses: Sequence[Address] = ()
    together: bool = True
    restarts: bool = False
    hub_addresses: Sequence[Address] = ()
    layout: Layout | None = None
    last: dict[int, _LastDatagram] = field(init=False, default_factory=dict)
    _ended: set[int] = field(init=False, default_factory=set)
    _gone: set[int] = field(init=False, default_factory=set)  # because of an error, or killed
    lost: set[int] = field(init=False, default_factory=set)
    _groups: dict[int, GroupReport] = field(init=False, default_factory=dict)  # on rank 0, by relay
    _details_until: float = field(init=False, default=-math.inf)  # on rank 0 and relays: until then, relays report every rank
    _reply: Diagnosis | None = field(init=False, default=None)  # from rank 0, on the others
    _last_diagnosis: Diagnosis | None = field(init=False, default=None)  # that rank 0 broadcast, or a relay passed on
    _number_sent: int = field(init=False, default=0)
    _number_received: dict[int, int] = field(init=False, default_factory=dict)  # by sender: a replayed datagram does not count

    def __post_init__(self) -> None:
        self._layout = layout = self.layout or Layout.of(max(1, len(self.contacts)))
        self._most_senders = layout.most_senders if layout.has_relays else layout.size
        self.hub = layout.hub_of(self.rank)
        self._above = {self.hub, 0} - {self.rank}  # the ranks that may send a diagnosis
        self._below = set(layout.senders(self.rank)) if layout.is_hub(self.rank) else set()
        self.began = time.monotonic()

    @cached_property
    def local(self) -> list[int]:
        """The ranks of this host."""
        return [rank for rank in range(len(self.contacts)) if self.is_local(rank)]

    @property
    def interval(self) -> float:
        """Seconds between two datagrams."""
        return max(INTERVAL, INTERVAL * self._most_senders / MANY)

    @property
    def decides(self) -> bool:
        """Whether this rank makes the diagnosis: it is rank 0, or it receives nothing from rank 0 or its relay."""
        return self.rank == 0 or not self._sources()

    def _sources(self) -> set[int]:
        """The ranks from which this one gets the diagnosis."""
        return (self._above & self.last.keys()) - self._gone - self._silent()

    def listen(self, seconds: float) -> None:
        """Handle the datagrams of other ranks for this long."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            if self.datagrams is None:
                time.sleep(remaining)
            elif (received := self.datagrams.receive(remaining)) is not None:
                self._handle(*received)

    def _handle(self, data: bytes, address: Address) -> None:
        # Authenticate before parsing: anyone who can reach the port could send input that breaks the parser.
        if (body := verify(self.contacts[0].token, data)) is None:
            return
        sender, receiver, number, content = json.loads(body)
        # Refuse replayed datagrams, also on another rank.
        if number <= self._number_received.get(sender, 0) or receiver != self.rank:
            return
        self._number_received[sender] = number
        if content == ENDED:
            self.last.pop(sender, None)
            self._ended.add(sender)
        elif content == FAILED:
            self._gone.add(sender)
        elif sender in self._above:
            self.last[sender] = _LastDatagram(None, time.monotonic(), address)
            self._follow(sender, *content)
        else:
            heartbeat, group = content
            self.last[sender] = _LastDatagram(Heartbeat(*heartbeat), time.monotonic(), address)
            if group is not None:
                self._take_group(sender, GroupReport.from_json(group))
            self._send_to(sender, address, self._reply_to_send())

    def _follow(self, sender: int, diagnosis: Sequence[Any] | None, needs_details: bool) -> None:
        """Take over a diagnosis from above; a relay passes it on."""
        before = self._reply
        self._reply = None if diagnosis is None else Diagnosis.from_json(diagnosis)
        if sender == self.hub != 0:
            self.last.pop(0, None)  # it need not send anything to this rank any more
        if needs_details:
            self._details_until = time.monotonic() + SECONDS_OF_DETAILS
        self._last_diagnosis = self._reply
        if self._reply != before:
            self._send_below(self._reply_to_send())

    def _take_group(self, relay: int, group: GroupReport) -> None:
        """On rank 0: take over what a relay reports."""
        self._groups[relay] = group
        self._gone |= set(group.gone)
        self._ended |= set(group.ended)
        now = time.monotonic()
        for rank, age, *heartbeat in group.members or ():
            last = self.last.get(rank)
            if last is None or last.address is None or last.received_at < now - age:
                self.last[rank] = _LastDatagram(Heartbeat(*heartbeat), now - age, None)

    def _group_report(self) -> GroupReport:
        """On a relay: what rank 0 needs to know about the ranks behind it."""
        now = time.monotonic()
        heard = {rank: last for rank, last in self.last.items() if rank in self._below}
        counted = (self._gone, self._ended, self.lost, self._silent())
        gone, ended, lost, silent = (tuple(ranks & self._below) for ranks in counted)
        is_overdue = any(last.heartbeat and last.heartbeat.overdue for rank, last in heard.items() if rank not in silent)
        report = GroupReport(gone, ended, lost, silent, is_overdue)
        if not report.is_trouble and now > self._details_until:
            return report
        entries = [(rank, round(now - last.received_at, 2), *values(last.heartbeat)) for rank, last in heard.items()]
        return replace(report, members=entries)

    def send(self, message: Heartbeat | str) -> None:
        """Send rank 0 or the relay a heartbeat, ENDED or FAILED. A hub also sends its ENDED or FAILED to the ranks below it."""
        if isinstance(message, str):
            self._send_below(message)
        if self.rank == 0:
            return
        content: object = message
        if isinstance(message, Heartbeat):
            content = [values(message), self._group_report().as_json() if self._below else None]
        for receiver in self._receivers():
            last = self.last[receiver] if receiver in self._sources() else None
            addresses = self.addresses if receiver == 0 else self.hub_addresses
            for address in addresses if last is None or last.address is None else [last.address]:
                self._send_to(receiver, address, content)

    def _receivers(self) -> Sequence[int]:
        """The ranks to send heartbeats to: the one that this rank always sends them to and, if that is a silent relay, rank 0."""
        is_new = time.monotonic() - self.began < SILENT * self.interval and self.hub not in self._gone | self._ended
        return [self.hub] if self.hub == 0 or self.hub in self._sources() or is_new else [self.hub, 0]

    def _reply_to_send(self) -> object:
        """The diagnosis for the ranks below, and whether relays have to report every rank."""
        diagnosis = self._last_diagnosis
        return [None if diagnosis is None else diagnosis.as_json(), time.monotonic() < self._details_until]

    def _send_below(self, content: object) -> None:
        for rank, last in list(self.last.items()):
            if rank not in self._above and last.address is not None:
                self._send_to(rank, last.address, content)

    def _send_to(self, receiver: int, address: Address, content: object) -> None:
        if self.datagrams is not None:
            self._number_sent += 1
            body = json.dumps([self.rank, receiver, self._number_sent, content]).encode()
            self.datagrams.send(sign(self.contacts[0].token, body), address)

    def close(self) -> None:
        if self.datagrams is not None:
            self.datagrams.close()

    def conclude(self, heartbeat: Heartbeat) -> Diagnosis | None:
        """Why the job makes no progress, as far as this rank can tell; None: it makes progress."""
        self._find_lost_hosts()
        decides = self.decides
        if decides or self._below:
            self._find_gone_ranks(set(self.local) - {self.rank} if decides else self._below.intersection(self.local))
        if not decides:
            return self._reply
        if self._groups and not self._update_details(heartbeat):
            return self._last_diagnosis
        # A rank ends in an orderly way only when all are about to, so a slower one is not blocked on it.
        are_blocked = self.together and not self._ended
        return diagnose(self.heartbeats(heartbeat), self._silent(), self._gone | self.lost if are_blocked else ())

    def _update_details(self, heartbeat: Heartbeat) -> bool:
        """On rank 0, ask relays for every rank if there is trouble, else forget what they said. Returns whether it knows enough
        for a diagnosis: all is well, or all relays that can have reported every rank."""
        now = time.monotonic()
        silent = self._silent()
        relays = (self._groups.keys() & self.last.keys()) - self._gone - silent
        is_trouble = bool(self._gone or self.lost) or any(self._groups[relay].is_trouble for relay in relays)
        direct = [last for rank, last in self.last.items() if last.address is not None and rank not in silent]
        if is_trouble or heartbeat.overdue or any(last.heartbeat and last.heartbeat.overdue for last in direct):
            self._details_until = now + SECONDS_OF_DETAILS
        elif now > self._details_until:  # what relays have reported gets old, and so do ranks that their relays hear again
            relayed = {rank for rank, last in self.last.items() if last.address is None}
            back = {rank for rank in silent - self._below if self._layout.hub_of(rank) in relays}
            self.last = {rank: last for rank, last in self.last.items() if rank not in relayed | back}
            return True
        return all(self._groups[relay].members is not None for relay in relays)

    def _find_gone_ranks(self, local: Collection[int]) -> None:
        """Find the ranks that ended without sending a message: on this host, their processes are gone; on other hosts, they are
        silent, and the kernel reports that their ports are closed."""
        self._gone |= {rank for rank in set(local) - self._ended if self.contacts[rank].process.has_ended()}
        if self.datagrams is None:
            return
        for rank in self._silent() & self.last.keys() - self._gone:
            last = self.last[rank]
            if last.address is None:
                continue
            if self.datagrams.refused.get(last.address, -math.inf) > last.received_at:
                self._gone.add(rank)
            else:
                self.datagrams.probe(last.address)

    def wait_for_ended(self, seconds: float) -> list[str]:
        """After a collective failed, wait at most this long for a rank that has ended; return a line for each one found.

        Unlike the other methods, this one may be called from any thread, while the watchdog's thread receives the replies.
        """
        began = time.monotonic()
        while True:
            ended = self._gone | {rank for rank in self.local if self.contacts[rank].process.has_ended()}
            for rank, last in list(self.last.items()):
                if self.datagrams is not None and last.address is not None:
                    ended |= {rank} if self.datagrams.refused.get(last.address, -math.inf) > began else set()
                    self.datagrams.probe(last.address)
            if ended - self._ended or time.monotonic() - began > seconds:
                return [self.ended_line(rank) for rank in sorted(ended - self._ended)][:SHOWN]
            time.sleep(max(0.05, len(self.local) / 500))  # every rank of the host does the same

    def ended_line(self, rank: int) -> str:
        """That a rank has ended, in words."""
        return f"rank {rank} on {self.contacts[rank].host} has ended"

    def _find_lost_hosts(self) -> None:
        """Find the silent ranks whose hosts no longer answer.

        Ask every host as soon as its ranks send heartbeats: one behind a firewall never answers, and must not count as lost. Only
        relays and the first rank of each host ask, as kernels limit how often they answer the same host.
        """
        self.lost = {rank for group in self._groups.values() for rank in group.lost}
        if self.datagrams is None or not self.restarts or not (self._below or self.rank == self.local[0]):
            return
        by_host: dict[str, set[int]] = defaultdict(set)
        for rank in self.last.keys() - self._gone:
            if (address := self.last[rank].address) is not None:
                by_host[address[0]].add(rank)
        silent = self._silent()
        for name, ranks in by_host.items():
            host = self.datagrams.hosts[name]
            if host.answers and not ranks <= silent:
                host.num_probes = 0
            else:
                self.datagrams.ask(name)
            if host.is_lost:
                self.lost |= ranks

    def broadcast(self, diagnosis: Diagnosis | None) -> None:
        """On a hub: send the diagnosis to the ranks below, now and with every reply from now on."""
        self._last_diagnosis = diagnosis
        self._send_below(self._reply_to_send())

    def heartbeats(self, heartbeat: Heartbeat) -> dict[int, Heartbeat]:
        """By rank, the last heartbeat, with the seconds since then counted as idle."""
        now = time.monotonic()
        return {self.rank: heartbeat} | {
            rank: replace(last.heartbeat, idle=last.heartbeat.idle + now - last.received_at)
            for rank, last in self.last.items()
            if last.heartbeat
        }

    def _silent(self) -> set[int]:
        now = time.monotonic()
        seconds = SILENT * self.interval
        more = 2 * self.interval  # what a relay reports is older
        silent = {
            rank
            for rank, last in self.last.items()
            if now - last.received_at > (seconds if last.address is not None else seconds + more)
        }
        if not self._below:
            return silent
        for relay in self._groups.keys() & self.last.keys() - silent:
            silent |= set(self._groups[relay].silent) - self.last.keys()
        never_heard = self._below.intersection(self.local) - self.last.keys() - self._ended
        return silent | {rank for rank in never_heard if self.contacts[rank].process.describe()}

    def reset_silence(self) -> None:
        """Count the others' silence from now on, as this process was suspended and cannot know how long they have been silent."""
        for last in self.last.values():
            last.received_at = time.monotonic()

    def is_local(self, rank: int) -> bool:
        """Whether a rank's process is on this host."""
        contact = self.contacts[rank]
        mine = self.contacts[self.rank]
        return (contact.host, contact.process.place) == (mine.host, mine.process.place)
