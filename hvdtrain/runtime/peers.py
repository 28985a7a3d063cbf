"""Other processes and hosts of the job, as kernels show them, whether or not a process can say it itself.

Of processes on this host, /proc tells whether they run, are stopped or gone. On another one, the kernel answers datagrams to
ports on which nobody listens: that tells a process that has ended from one that is stopped, and a lost host from one that runs.
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

STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a network file system",
    "Z": "has ended",
    "X": "has ended",
    "": "has ended",
}
"""What a process does that gives no sign of life, by the state in /proc."""


@dataclass(frozen=True)
class Process:
    """A process of the job.

    Attributes:
        place: the same for two processes that see each other's ids.
        began: when it was started, in the kernel's ticks; a later process with the same id has another one.
    """

    pid: int
    place: str
    began: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process that this one sees."""
        with suppress(OSError):
            place = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() + os.readlink("/proc/self/ns/pid")
            return cls(pid, place, _stat(pid)[1])
        return cls(pid, secrets.token_hex(), "")  # no /proc: it is seen by nobody

    def state(self) -> str:
        """The letter of its state, as of `ps`; empty: it is gone; "?": this one has too many open files to look. Only where it is
        seen.
        """
        try:
            state, began = _stat(self.pid)
        except OSError:
            return "?"
        return state if began == self.began else ""

    def has_ended(self) -> bool:
        """Whether it is gone, also if its launcher has not noticed yet. Only where it is seen."""
        return self.state() in ("Z", "X", "")

    def describe(self) -> str | None:
        """What it does that explains that nothing is heard of it; None: it runs. Only where it is seen."""
        return STATES.get(self.state())

    def send(self, number: int) -> None:
        """Send a signal, if it is still there. Only where it is seen."""
        if self.state() not in ("", "?"):
            with suppress(OSError):
                os.kill(self.pid, number)


MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")

DAEMONS = (*MPIRUN, "orted", "prted")
"""What starts the ranks of Open MPI, and waits for ever for a host that it does not know to be lost."""

END_LATER = 'sleep {seconds}; [ "$(cut -d " " -f 22 /proc/{pid}/stat)" = {began} ] && kill -KILL {pid}'


def end_daemon_later(seconds: float) -> None:
    """If Open MPI started this process, end the daemon that did, unless it has ended by then: another process does it, as the
    daemon may end this one first.
    """
    with suppress(OSError):
        daemon = Process.of(os.getppid())
        if Path(f"/proc/{daemon.pid}/comm").read_text(encoding="utf-8").strip() in DAEMONS:
            command = END_LATER.format(seconds=seconds, pid=daemon.pid, began=daemon.began)
            nothing = subprocess.DEVNULL
            subprocess.Popen(["sh", "-c", command], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def print_through_mpirun(text: str) -> bool:
    """Print to the stderr of the mpirun that started this process on this host; whether that was possible.

    While mpirun ends its ranks, after Ctrl-C or SIGTERM, it does not read what they print.
    """
    parent = os.getppid()
    try:
        if Path(f"/proc/{parent}/comm").read_text(encoding="utf-8").strip() not in MPIRUN:
            return False
        with open(f"/proc/{parent}/fd/2", "a", encoding="utf-8") as stderr:
            print(text, file=stderr, flush=True)
        return True
    except OSError:
        return False


def _stat(pid: int) -> tuple[str, str]:
    """A process's state and start; empty if it is gone. Raises: OSError: it cannot be read."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return parts[0], parts[19]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return "", ""


Address = tuple[str, int]
"""An IPv4 address and a port."""

CLOSED_PORT = 1
"""A port on which nobody listens: that of tcpmux, which does not use UDP."""

IP_RECVERR = 11
"""Linux's option of a socket that receives errors; Python has a name for it since 3.14."""

ASK_EVERY = 1.0
"""Seconds between two questions to a host. Linux answers each other host about once a second."""

SECONDS_TO_ANSWER = 10.0
"""For how long a host is asked in vain before it is lost."""


@dataclass
class Host:
    """What is known of the kernel of a host.

    Attributes:
        answers: whether it has ever answered; behind a firewall it may never do.
        asked: how often it was asked in vain. Not seconds: they pass also while this process is suspended.
        asked_at: when it was last asked.
    """

    answers: bool = False
    asked: int = 0
    asked_at: float = -math.inf

    @property
    def is_lost(self) -> bool:
        """Whether it was asked in vain for long, though it has answered before."""
        return self.answers and self.asked * ASK_EVERY > SECONDS_TO_ANSWER


DIGEST = "sha256"

DIGEST_BYTES = 32
"""What every datagram begins with: an HMAC of the rest with the job's token, so that nothing of a stranger's is ever parsed."""


def authenticated(token: str, body: bytes) -> bytes:
    """A datagram of the job with this token."""
    return hmac.digest(token.encode(), body, DIGEST) + body


def body_of(token: str, datagram: bytes) -> bytes | None:
    """What a datagram says; None: it does not come from the job with this token, or it was changed on its way.

    >>> body_of("ours", authenticated("ours", b"text")), body_of("ours", authenticated("theirs", b"text")), body_of("ours", b"[")
    (b'text', None, None)
    """
    body = datagram[DIGEST_BYTES:]
    is_ours = hmac.compare_digest(datagram[:DIGEST_BYTES], hmac.digest(token.encode(), body, DIGEST))
    return body if is_ours else None


class Datagrams:
    """A UDP socket that also learns which ports are closed: the kernels of their hosts say so (ICMP, port unreachable).

    Attributes:
        host, port: where it listens; 0.0.0.0: on all interfaces.
        hosts: by address.
        refused: when a host last said that nobody listens on a port.
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
        """Send a datagram, if that is possible."""
        for _ in range(2):  # an error that an earlier one met is raised by the next call, which then sends nothing
            try:
                self._udp.sendto(data, address)
                return
            except OSError:
                self._take_errors()

    def probe(self, address: Address) -> None:
        """Send a datagram that says nothing: if nobody listens there, the answer is found in `refused`."""
        self.send(b"", address)

    def ask(self, name: str) -> None:
        """Ask a host whether it is there. Call it again and again; one that never answers is left alone after some time."""
        host, now = self.hosts[name], time.monotonic()
        if now - host.asked_at >= ASK_EVERY and (host.answers or host.asked * ASK_EVERY < SECONDS_TO_ANSWER):
            host.asked, host.asked_at = host.asked + 1, now
            self.probe((name, CLOSED_PORT))

    def receive(self, seconds: float) -> tuple[bytes, Address] | None:
        """The next datagram; None: there was none within this time, or errors came instead."""
        self._poll.poll(1000 * max(seconds, 0.001))
        self._take_errors()
        with suppress(OSError):
            data, address = self._udp.recvfrom(65536)
            return data, address
        return None

    def _take_errors(self) -> None:
        with suppress(OSError):  # there are no more
            while True:
                _, parts, _, address = self._udp.recvmsg(0, 512, socket.MSG_ERRQUEUE)
                if any(part[:2] == (socket.IPPROTO_IP, IP_RECVERR) and _refuses(part[2], address[0]) for part in parts):
                    self.refused[address] = time.monotonic()
                    host = self.hosts[address[0]]
                    host.answers, host.asked = True, 0

    def close(self) -> None:
        """Close the socket."""
        self._udp.close()


def _refuses(error: bytes, host: str) -> bool:
    """Whether an error of a socket (struct sock_extended_err, and who reports it) is a host's own answer that a port is closed.

    A router reports that it cannot reach a host, and a firewall may say anything in its own name.
    """
    return struct.unpack_from("=I", error)[0] == errno.ECONNREFUSED and socket.inet_ntoa(error[20:24]) == host


LOOPBACK = "127.0.0.1"


def network() -> str:
    """The same for two processes that reach each other on the loopback interface."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() + os.readlink("/proc/self/ns/net")
    return secrets.token_hex()  # no /proc: it is unknown


def open_datagrams(host: str = "") -> Datagrams | None:
    """Datagrams on any port of one address, or of all; None on a host without IPv4."""
    try:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((host, 0))
        return Datagrams(udp)
    except OSError:
        return None
