"""The state of the job's processes and hosts as kernels report it, so that it is known even if a process cannot respond.

For processes on this host, /proc says whether they are running, stopped or gone. On another host, the kernel rejects datagrams to
closed ports: this distinguishes a process that has ended from a stopped one, and a lost host from a running one.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import secrets
import select
import socket
import struct
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.runtime.mpirun import MPIRUN

STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "is waiting for a disk or a network file system",
    "Z": "has ended",
    "X": "has ended",
    "": "has ended",
}
"""Why a process is silent, by its state in /proc."""


@dataclass(frozen=True)
class RankProcess:
    """A process of the job.

    Attributes:
        place: the host and its PID namespace; processes with the same one can signal each other.
        began: when it was started, in the kernel's ticks; it distinguishes a later process with the same id.
    """

    pid: int
    place: str
    began: str

    @classmethod
    def of_pid(cls, pid: int) -> RankProcess:
        """A process in this PID namespace."""
        with suppress(OSError):
            place = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() + os.readlink("/proc/self/ns/pid")
            return cls(pid, place, _stat(pid)[1])
        return cls(pid, secrets.token_hex(), "")  # no /proc: unlike the place of any other process

    def state(self) -> str:
        """Its state, as the letter that `ps` shows; empty: it is gone; "?": /proc cannot be read, as with too many open files.
        Only in the same place.
        """
        try:
            state, began = _stat(self.pid)
        except OSError:
            return "?"
        return state if began == self.began else ""

    def has_ended(self) -> bool:
        """Whether it is gone, even if its launcher has not noticed yet. Only in the same place."""
        return self.state() in ("Z", "X", "")

    def describe(self) -> str | None:
        """Why it is silent; None: it is running. Only in the same place."""
        return STATES.get(self.state())

    def send(self, number: int) -> None:
        """Send a signal, if it still exists. Only in the same place."""
        if self.state() not in ("", "?"):
            with suppress(OSError):
                os.kill(self.pid, number)


DAEMONS = (*MPIRUN, "orted", "prted")
"""The programs that start the ranks of Open MPI. They wait forever for a lost host that they take for a running one."""

END_LATER = 'sleep {seconds}; [ "$(cut -d " " -f 22 /proc/{pid}/stat)" = {began} ] && kill -KILL {pid}'


def end_daemon_later(seconds: float) -> None:
    """If Open MPI started this process, end the daemon that did, unless it has ended by then. A separate process does so, as the
    daemon may end this one first.
    """
    with suppress(OSError):
        daemon = RankProcess.of_pid(os.getppid())
        if Path(f"/proc/{daemon.pid}/comm").read_text(encoding="utf-8").strip() in DAEMONS:
            command = END_LATER.format(seconds=seconds, pid=daemon.pid, began=daemon.began)
            nothing = subprocess.DEVNULL
            subprocess.Popen(["sh", "-c", command], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def _stat(pid: int) -> tuple[str, str]:
    """A process's state and start; empty if it is gone. Raises: OSError, if it cannot be read."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return parts[0], parts[19]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return "", ""


Address = tuple[str, int]
"""An IPv4 address and a port."""

CLOSED_PORT = 1
"""A port that is always closed: that of tcpmux, which does not use UDP."""

IP_RECVERR = 11
"""Linux's socket option to receive errors; Python has a name for it since 3.14."""

ASK_EVERY = 1.0
"""Seconds between two probes of a host. Linux answers each host at most about once a second."""

SECONDS_TO_ANSWER = 10.0
"""A host that has not answered for this long is lost."""


@dataclass
class Host:
    """Whether a host's kernel answers.

    Attributes:
        answers: whether it has ever answered; behind a firewall it may never do so.
        num_probes: since its last answer. Not seconds, which would count the time this process is suspended.
        probed_at: when it was last probed.
    """

    answers: bool = False
    num_probes: int = 0
    probed_at: float = -math.inf

    @property
    def is_lost(self) -> bool:
        """Whether it has stopped answering."""
        return self.answers and self.num_probes * ASK_EVERY > SECONDS_TO_ANSWER


DIGEST = "sha256"

DIGEST_BYTES = 32
"""Every datagram begins with an HMAC of the rest, keyed with the job's token, so that foreign data is never parsed."""


def sign(token: str, body: bytes) -> bytes:
    return hmac.digest(token.encode(), body, DIGEST) + body


def verify(token: str, datagram: bytes) -> bytes | None:
    """The body of a datagram; None: it does not come from the job with this token, or was altered on the way.

    >>> verify("ours", sign("ours", b"text")), verify("ours", sign("theirs", b"text")), verify("ours", b"[")
    (b'text', None, None)
    """
    body = datagram[DIGEST_BYTES:]
    is_ours = hmac.compare_digest(datagram[:DIGEST_BYTES], hmac.digest(token.encode(), body, DIGEST))
    return body if is_ours else None


class Datagrams:
    """A UDP socket that also learns which remote ports are closed (ICMP, port unreachable).

    Attributes:
        host, port: the address it listens on; 0.0.0.0: on all interfaces.
        hosts: by address.
        refused: when a host last reported that a port is closed.
    """

    def __init__(self, udp: socket.socket) -> None:
        self.host: str
        self.port: int
        self.host, self.port = udp.getsockname()
        self.hosts: dict[str, Host] = defaultdict(Host)
        self.refused: dict[Address, float] = {}
        self._udp = udp
        self._poll = select.poll()
        udp.setblocking(False)
        udp.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
        self._poll.register(udp, select.POLLIN)

    def send(self, data: bytes, address: Address) -> None:
        for _ in range(2):  # the error of an earlier datagram is raised by the next call, which then sends nothing
            try:
                self._udp.sendto(data, address)
                return
            except OSError:
                self._take_errors()

    def probe(self, address: Address) -> None:
        """Send an empty datagram: if the port is closed, `refused` gets the answer."""
        self.send(b"", address)

    def ask(self, name: str) -> None:
        """Ask a host whether it is up. Call this repeatedly; a host that never answers is no longer asked after some time."""
        host = self.hosts[name]
        now = time.monotonic()
        if now - host.probed_at >= ASK_EVERY and (host.answers or host.num_probes * ASK_EVERY < SECONDS_TO_ANSWER):
            host.num_probes += 1
            host.probed_at = now
            self.probe((name, CLOSED_PORT))

    def receive(self, seconds: float) -> tuple[bytes, Address] | None:
        """The next datagram; None: there was none within this time, or only errors."""
        self._poll.poll(1000 * max(seconds, 0.001))
        self._take_errors()
        with suppress(OSError):
            data, address = self._udp.recvfrom(65536)
            return data, address
        return None

    def _take_errors(self) -> None:
        with suppress(OSError):  # there are no more
            while True:
                _, messages, _, address = self._udp.recvmsg(0, 512, socket.MSG_ERRQUEUE)
                if any(
                    message[:2] == (socket.IPPROTO_IP, IP_RECVERR) and _refuses(message[2], address[0]) for message in messages
                ):
                    self.refused[address] = time.monotonic()
                    host = self.hosts[address[0]]
                    host.answers = True
                    host.num_probes = 0

    def close(self) -> None:
        self._udp.close()


def _refuses(error: bytes, host: str) -> bool:
    """Whether an error of a socket (struct sock_extended_err, then its sender) comes from the host whose port is closed.

    A router that cannot reach the host, or a firewall, reports errors, too, but in its own name.
    """
    return struct.unpack_from("=I", error)[0] == errno.ECONNREFUSED and socket.inet_ntoa(error[20:24]) == host


LOOPBACK = "127.0.0.1"


def network() -> str:
    """An id of the network namespace: processes with the same one reach each other on the loopback interface."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() + os.readlink("/proc/self/ns/net")
    return secrets.token_hex()  # no /proc: the namespace is unknown


def open_datagrams(host: str = "") -> Datagrams | None:
    """Listen on a free port of an address, or of all addresses; None on a host without IPv4."""
    try:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((host, 0))
        return Datagrams(udp)
    except OSError:
        return None
