"""The rendezvous of a torch.distributed job: rank 0 serves a store that the others connect to.

`meet` connects the processes at their meeting point (meeting_point.py), and imports torch when it is called.

torch's own `init_method` file:// hangs or fails if the file is left over from an earlier run, and workers that torchrun
restarts read the addresses of their dead predecessors. So a rank accepts an address only if the store at that address returns
the token posted with it; otherwise the address is stale, and the rank reads it again.
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hvdtrain.comm import mpi
from hvdtrain.comm.meeting_point import LOOPBACK, Address, Agent, MeetingPoint, SharedFile
from hvdtrain.disk.atomic import write_atomically
from hvdtrain.errors import LaunchError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore


POLL_INTERVAL = 0.05
"""Seconds between two attempts to read or connect."""

BACKLOG = 1024
"""The number of simultaneous connections that may wait to be accepted."""

REPORT_AFTER = 15.0
"""Seconds after which rank 0 reports the ranks that it is waiting for."""

OUTCOME, COMPLETE = "outcome", "all ranks are connected"

QUESTIONS = 10_000
"""The questions per second of all ranks together that the store of rank 0 can answer without effort."""

LISTED = 16
"""The most ranks that a message lists."""


def names_of_this_host() -> list[str]:
    """The names under which other ranks may reach this host: its name, its addresses, and the loopback address."""
    name = socket.gethostname()
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)]
    except OSError:
        addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect(("10.255.255.255", 1))
            addresses.append(probe.getsockname()[0])
        except OSError:
            pass  # there is only the loopback network
    outside = [address for address in addresses if not address.startswith(("127.", "::1"))]
    return list(dict.fromkeys([name, *outside, LOOPBACK]))


class Board(Protocol):
    """A point where rank 0 posts its address for the others."""

    def post(self, text: str) -> None: ...

    def read(self) -> str | None:
        """The text that was posted last; None if there is none yet."""
        ...


class FileBoard:
    """A file on a disk that all ranks share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def post(self, text: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, text, has_peers=True)
        except OSError as error:
            raise LaunchError(f"file://{self._path}: expected a writable file, got: {error.strerror}") from None

    def read(self) -> str | None:
        try:
            return self._path.read_text()
        except OSError:
            return None


class AgentBoard:
    """torchrun's store. Its agent keeps it across restarts, so it may hold the address of a dead rank 0."""

    def __init__(self, point: Agent, deadline: float) -> None:
        self._store = _connect((point.host,), point.port, deadline)
        if self._store is None:
            raise LaunchError(f"expected torchrun's store at {point.host}:{point.port}, got no answer there")

    def post(self, text: str) -> None:
        self._store.set("hvdtrain.address", text)  # type: ignore[union-attr]

    def read(self) -> str | None:
        if not self._store.check(["hvdtrain.address"]):  # type: ignore[union-attr]
            return None
        return self._store.get("hvdtrain.address").decode()  # type: ignore[union-attr]


class MPIBoard:
    """An MPI broadcast, for mpirun on several hosts, whose environment does not contain the host of rank 0."""

    def post(self, text: str) -> None:
        mpi.from_rank_zero(text)

    def read(self) -> str | None:
        return mpi.from_rank_zero(None)


KEPT: dict[tuple[str, int, int], list[Store]] = {}
"""By point, rank and size, the stores of this process's jobs: that at which its ranks met, and those within it for later jobs.
Rank 0 cannot listen on a fixed port again while another rank is still connected there."""


def meet(
    point: MeetingPoint | None, rank: int, size: int, timeout: float, on_one_host: bool = False, *, stays: bool = False
) -> Store:
    """Collective. Return a store that all ranks share, as soon as all of them are connected.

    Args:
        point: the rendezvous; None: rank 0 broadcasts its address over MPI.
        timeout: seconds to wait for the other ranks.
        on_one_host: all ranks are on one host. They connect over the loopback address, which other hosts cannot reach.
        stays: the ranks may meet again at this point: each as often as the others.

    Raises:
        LaunchError: a rank is missing or present twice, or the ranks disagree on their number.
    """
    deadline = time.monotonic() + timeout
    jobs = KEPT.setdefault((str(point), rank, size), []) if stays else []
    if jobs:
        from torch._C._distributed_c10d import PrefixStore

        jobs.append(PrefixStore(f"job {len(jobs)}", jobs[0]))
        _check_in(jobs[-1], point, rank, size, deadline)
        return jobs[-1]
    if isinstance(point, Address):
        hosts = (LOOPBACK,) if on_one_host else point.hosts
        store = _serve(point.port, on_one_host) if rank == 0 else _connect(hosts, point.port, deadline)
    else:
        board: Board
        if isinstance(point, SharedFile):
            board = FileBoard(point.path)
        else:
            board = MPIBoard() if point is None else AgentBoard(point, deadline)
        if rank == 0:
            names = [*names_of_this_host(), *([point.host] if isinstance(point, Agent) else [])]
            store = _serve_and_post(board, [LOOPBACK] if on_one_host else names, on_one_host)
        else:
            store = _read_and_connect(board, deadline)
    if store is None:
        raise LaunchError(
            f"rank {rank} of {size}: expected rank 0 at {point}, got no answer within {timeout:.0f} s (was it started? can this "
            "host connect to it, or does a firewall block the port?)"
        )
    _check_in(store, point, rank, size, deadline)
    if isinstance(point, SharedFile) and rank == 0:
        point.path.unlink(missing_ok=True)  # all ranks have read it
    jobs.append(store)
    return store


def _serve(port: int, on_one_host: bool) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    patience = timedelta(minutes=5)
    if not on_one_host:
        with _quiet_port(port):
            return TCPStore(LOOPBACK, port, None, True, patience, wait_for_workers=False)
    # A TCPStore ignores its host argument and listens on all interfaces, unless it gets a listening socket.
    with _quiet_port(port), socket.create_server((LOOPBACK, port), backlog=BACKLOG) as server:
        port = server.getsockname()[1]
        return TCPStore(LOOPBACK, port, None, True, patience, wait_for_workers=False, master_listen_fd=server.detach())


def _serve_and_post(board: Board, names: list[str], on_one_host: bool) -> TCPStore:
    store = _serve(0, on_one_host)
    token = secrets.token_hex(8)
    store.set("token", token)
    board.post(json.dumps({"hosts": names, "port": store.port, "token": token}))
    return store


def _read_and_connect(board: Board, deadline: float) -> TCPStore | None:
    while time.monotonic() < deadline:
        posted = _parse_address(board.read())
        if posted is not None:
            hosts, port, token = posted
            store = _connect(hosts, port, min(deadline, time.monotonic() + POLL_INTERVAL))
            if store is not None and store.check(["token"]) and store.get("token").decode() == token:
                return store
        time.sleep(POLL_INTERVAL)
    return None


def _parse_address(text: str | None) -> tuple[tuple[str, ...], int, str] | None:
    """Parse hosts, port and token; None if there is no text, or it is not an address."""
    try:
        posted = json.loads(text or "")
        return tuple(posted["hosts"]), int(posted["port"]), str(posted["token"])
    except (ValueError, KeyError, TypeError):
        return None


def _connect(hosts: tuple[str, ...], port: int, deadline: float) -> TCPStore | None:
    """Connect to the store on the first of the hosts that answers; None after the deadline."""
    from torch._C._distributed_c10d import TCPStore

    while True:
        for host in hosts:
            # Try a plain socket first: a TCPStore whose connection is refused prints a long C++ stack trace.
            try:
                socket.create_connection((host, port), timeout=3).close()
                return TCPStore(host, port, None, False, timedelta(minutes=5), wait_for_workers=False)
            except (OSError, RuntimeError):
                continue
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_INTERVAL)


def _check_in(store: Store, point: MeetingPoint | None, rank: int, size: int, deadline: float) -> None:
    """Collective. Wait until all ranks are connected and check that they belong together. If one finds a problem, all raise.

    The ranks only count themselves, and the last one says that they are complete: if each of N ranks looked for all others, the
    store of rank 0 would have to answer N * N questions.
    """

    def decide(outcome: str) -> None:
        """The first outcome counts, for all ranks."""
        store.compare_set(OUTCOME, "", outcome)

    expected = int(store.compare_set("size", "", str(size)))
    problem = None
    if expected != size:
        problem = f"{point}: expected the same number of processes on all ranks, got {expected} and {size}"
    elif store.add(_name(rank), 1) > 1:
        problem = f"{point}: expected distinct ranks, got rank {rank} twice (does another job use the same address?)"
    elif store.add("present", 1) == size:
        decide(COMPLETE)
    if problem is not None:
        decide(problem)
    has_reported = has_searched = False
    started = time.monotonic()
    while not store.check([OUTCOME]):
        if not has_reported and rank == 0 and time.monotonic() - started > REPORT_AFTER:
            missing = _missing(store, size)
            sys.stderr.write(f"rank 0 waits at {point} for rank {missing} of {size}\n")  # the log is not open yet
            has_reported = True
        if not has_searched and time.monotonic() >= deadline:
            has_searched = True
            if store.add("searches", 1) == 1:  # one rank searches for all
                missing = _missing(store, size)
                decide(f"{point}: expected {size} processes, got none with rank {missing} in time" if missing else COMPLETE)
        time.sleep(max(POLL_INTERVAL, size / QUESTIONS))
    outcome = store.get(OUTCOME).decode()
    if outcome == COMPLETE and problem is None:
        return
    if rank == 0:  # the store ends with this process, and the others have to read the problem first
        time.sleep(max(1, 3 * size / QUESTIONS))
    raise LaunchError(problem or outcome)


def _name(rank: int) -> str:
    return f"rank.{rank}"


def _missing(store: Store, size: int) -> str:
    missing = [str(rank) for rank in range(size) if not store.check([_name(rank)])]
    more = [f"{len(missing) - LISTED} more"] if len(missing) > LISTED else []
    return ", ".join([*missing[:LISTED], *more])


@contextmanager
def _quiet_port(port: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" not in str(error) and getattr(error, "errno", None) != errno.EADDRINUSE:
            raise
        raise LaunchError(
            f"expected port {port} of this host to be free for rank 0, got one in use (by another job, or was rank 0 started "
            "twice? set MASTER_PORT or init_method to use another one)"
        ) from None
