"""The rendezvous of a torch.distributed job: rank 0 serves a store, and the other ranks connect to it.

torch's own `init_method` file:// hangs or fails if the file is left over from an earlier run, and workers that torchrun
restarts read the addresses of their dead predecessors. So a rank accepts an address only if the store behind it returns the
token that was posted with the address; otherwise the address is stale, and the rank reads it again.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import Store, TCPStore

from hvdtrain.comm import mpi
from hvdtrain.comm.rendezvous import Address, Agent, Place, SharedFile, names_of_this_host
from hvdtrain.errors import LaunchError

POLL_INTERVAL = 0.05
"""Seconds between two attempts to read or connect."""

REPORT_AFTER = 15.0
"""Seconds after which rank 0 reports which ranks it waits for."""


class Board(Protocol):
    """A place where rank 0 posts its address for the others."""

    def post(self, text: str) -> None: ...

    def read(self) -> str | None:
        """The text that was posted last; None if there is none yet."""
        ...


class FileBoard:
    """A file on a disk that all ranks share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def post(self, text: str) -> None:
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(text)
            os.replace(unfinished, self._path)
        except OSError as error:
            raise LaunchError(f"file://{self._path}: expected a writable file, got: {error.strerror}") from None

    def read(self) -> str | None:
        try:
            return self._path.read_text()
        except OSError:
            return None


class AgentBoard:
    """torchrun's store. Its agent keeps it across restarts, so it may hold the address of a dead rank 0."""

    def __init__(self, place: Agent, deadline: float) -> None:
        self._store = _connect((place.host,), place.port, deadline)
        if self._store is None:
            raise LaunchError(f"expected torchrun's store at {place.host}:{place.port}, got no answer there")

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


def meet(place: Place | None, rank: int, size: int, timeout: float) -> Store:
    """Collective. Return a store that all ranks share, as soon as all of them are connected.

    Args:
        place: the rendezvous; None: rank 0 broadcasts its address over MPI.
        timeout: seconds to wait for the other ranks.

    Raises:
        LaunchError: a rank is missing or present twice, or the ranks disagree on their number.
    """
    deadline = time.monotonic() + timeout
    if isinstance(place, Address):
        store = _serve(place.port) if rank == 0 else _connect(place.hosts, place.port, deadline)
    else:
        board: Board
        if isinstance(place, SharedFile):
            board = FileBoard(place.path)
        else:
            board = MPIBoard() if place is None else AgentBoard(place, deadline)
        if rank == 0:
            store = _serve_and_post(board, [place.host] if isinstance(place, Agent) else [])
        else:
            store = _read_and_connect(board, deadline)
    if store is None:
        raise LaunchError(
            f"rank {rank} of {size}: expected rank 0 at {place}, got no answer within {timeout:.0f} s (was it started? can this "
            "host connect to it, or does a firewall block the port?)"
        )
    _check_in(store, place, rank, size, deadline)
    if isinstance(place, SharedFile) and rank == 0:
        place.path.unlink(missing_ok=True)  # all ranks have read it
    return store


def _serve(port: int) -> TCPStore:
    with _quiet_port(port):
        return TCPStore("127.0.0.1", port, None, True, timedelta(minutes=5), wait_for_workers=False)


def _serve_and_post(board: Board, more_names: list[str]) -> TCPStore:
    store = _serve(0)
    token = secrets.token_hex(8)
    store.set("token", token)
    board.post(json.dumps({"hosts": [*names_of_this_host(), *more_names], "port": store.port, "token": token}))
    return store


def _read_and_connect(board: Board, deadline: float) -> TCPStore | None:
    while time.monotonic() < deadline:
        posted = _parsed(board.read())
        if posted is not None:
            hosts, port, token = posted
            store = _connect(hosts, port, min(deadline, time.monotonic() + POLL_INTERVAL))
            if store is not None and store.check(["token"]) and store.get("token").decode() == token:
                return store
        time.sleep(POLL_INTERVAL)
    return None


def _parsed(text: str | None) -> tuple[tuple[str, ...], int, str] | None:
    """Parse hosts, port and token; None if there is no text, or if it is something else."""
    try:
        posted = json.loads(text or "")
        return tuple(posted["hosts"]), int(posted["port"]), str(posted["token"])
    except (ValueError, KeyError, TypeError):
        return None


def _connect(hosts: tuple[str, ...], port: int, deadline: float) -> TCPStore | None:
    """Connect to the store on the first of the hosts that answers; None after the deadline."""
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


def _check_in(store: Store, place: Place | None, rank: int, size: int, deadline: float) -> None:
    """Collective. Wait until all ranks are connected and check that they belong together. If one finds a problem, all raise."""
    expected = int(store.compare_set("size", "", str(size)))
    if expected != size:
        store.set("problem", f"{place}: expected the same number of processes on all ranks, got {expected} and {size}")
    elif store.add(f"rank.{rank}", 1) > 1:
        store.set("problem", f"{place}: expected distinct ranks, got rank {rank} twice (does another job use the same address?)")
    has_reported = False
    started = time.monotonic()
    while not store.check(["problem"]):
        missing = [str(other) for other in range(size) if not store.check([f"rank.{other}"])]
        if not missing:
            return
        if not has_reported and rank == 0 and time.monotonic() - started > REPORT_AFTER:
            sys.stderr.write(f"rank 0 waits at {place} for rank {', '.join(missing)} of {size}\n")  # the log is not open yet
            has_reported = True
        if time.monotonic() >= deadline:
            store.set("problem", f"{place}: expected {size} processes, got none with rank {', '.join(missing)} in time")
        time.sleep(POLL_INTERVAL)
    problem = store.get("problem").decode()
    store.add("knows_the_problem", 1)
    if rank == 0:
        time.sleep(1)  # the store ends with this process, and the others have to read the problem first
    raise LaunchError(problem)


@contextmanager
def _quiet_port(port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise LaunchError(
            f"expected port {port} of this host to be free for rank 0, got one in use (by another job, or was rank 0 started "
            "twice? set MASTER_PORT or init_method to use another one)"
        ) from None
