"""Other processes of the job on this host, as /proc shows them: whether they run, are stopped or gone."""

from __future__ import annotations

import os
import secrets
import subprocess
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
        """The letter of its state, as of `ps`; empty: it is gone. Only where it is seen."""
        state, began = _stat(self.pid)
        return state if began == self.began else ""

    def describe(self) -> str | None:
        """What it does that explains that nothing is heard of it; None: it runs. Only where it is seen."""
        return STATES.get(self.state())

    def send(self, number: int) -> None:
        """Send a signal, if it is still there. Only where it is seen."""
        if self.state():
            with suppress(OSError):
                os.kill(self.pid, number)


DAEMONS = ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted")
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


def _stat(pid: int) -> tuple[str, str]:
    """A process's state and start; empty if it is gone."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return parts[0], parts[19]
    except (OSError, IndexError):
        return "", ""
