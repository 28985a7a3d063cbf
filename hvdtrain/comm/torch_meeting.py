"""The processes of a torch.distributed job meet: rank 0 serves a store, the others find it.

torch's own `init_method` file:// hangs or fails where the file exists from an earlier run, and torchrun's restarted workers
read addresses of their dead predecessors. So nobody here believes an address before the store behind it has answered with
the word that stands beside the address; what does not is taken for old, and looked at again.
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
from hvdtrain.comm.rendezvous import Address, Agent, Place, SharedFile
from hvdtrain.errors import LaunchError

PAUSE = 0.05
"""Seconds between two looks."""

TELL_AFTER = 15.0
"""Seconds after which rank 0 says for whom it waits."""


class Board(Protocol):
    """Where rank 0 leaves a word for the others."""

    def post(self, text: str) -> None: ...

    def read(self) -> str | None:
        """The last word; None: there is none yet."""
        ...


class FileBoard:
    """A file on a disk that all ranks see."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def post(self, text: str) -> None:
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(text)
            os.replace(unfinished, self._path)
        except OSError as error:
            raise LaunchError(f"file://{self._path}: expected a file that can be written, got: {error.strerror}") from None

    def read(self) -> str | None:
        try:
            return self._path.read_text()
        except OSError:
            return None


class AgentBoard:
    """torchrun's store. Its agent keeps it over restarts, so it may hold what a dead rank 0 left."""

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
    """An MPI broadcast, for an mpirun over several hosts, whose environment does not say where rank 0 is."""

    def post(self, text: str) -> None:
        mpi.from_rank_zero(text)

    def read(self) -> str | None:
        return mpi.from_rank_zero(None)


def meet(place: Place | None, rank: int, size: int, timeout: float) -> Store:
    """Collective. A store that all ranks share, once all are there.

    Args:
        place: where; None: wherever an MPI broadcast says.
        timeout: seconds to wait for the others.

    Raises:
        LaunchError: somebody is missing, is there twice, or believes in another number of processes.
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
        store = _serve_and_post(board) if rank == 0 else _read_and_connect(board, deadline)
    if store is None:
        raise LaunchError(
            f"rank {rank} of {size}: expected rank 0 at {place}, got no answer within {timeout:.0f} s (was it started? can this "
            "host reach that one, or does a firewall stand between them?)"
        )
    _check_in(store, place, rank, size, deadline)
    if isinstance(place, SharedFile) and rank == 0:
        place.path.unlink(missing_ok=True)  # all have read it
    return store


def _serve(port: int) -> TCPStore:
    with _quiet_port(port):
        return TCPStore("127.0.0.1", port, None, True, timedelta(minutes=5), wait_for_workers=False)


def _serve_and_post(board: Board) -> TCPStore:
    store = _serve(0)
    word = secrets.token_hex(8)
    store.set("word", word)
    board.post(json.dumps({"hosts": _names_of_this_host(), "port": store.port, "word": word}))
    return store


def _read_and_connect(board: Board, deadline: float) -> TCPStore | None:
    while time.monotonic() < deadline:
        posted = _parsed(board.read())
        if posted is not None:
            hosts, port, word = posted
            store = _connect(hosts, port, min(deadline, time.monotonic() + PAUSE))
            if store is not None and store.check(["word"]) and store.get("word").decode() == word:
                return store
        time.sleep(PAUSE)
    return None


def _parsed(text: str | None) -> tuple[tuple[str, ...], int, str] | None:
    """Hosts, port and word; None where there are none, or what is there is something else."""
    try:
        posted = json.loads(text or "")
        return tuple(posted["hosts"]), int(posted["port"]), str(posted["word"])
    except (ValueError, KeyError, TypeError):
        return None


def _connect(hosts: tuple[str, ...], port: int, deadline: float) -> TCPStore | None:
    """A client of the store at the first of the hosts' names behind which there is one; None after the deadline."""
    while True:
        for host in hosts:
            # A plain socket first: a TCPStore that is refused prints pages of C++ addresses.
            try:
                socket.create_connection((host, port), timeout=3).close()
                return TCPStore(host, port, None, False, timedelta(minutes=5), wait_for_workers=False)
            except (OSError, RuntimeError):
                continue
        if time.monotonic() >= deadline:
            return None
        time.sleep(PAUSE)


def _check_in(store: Store, place: Place | None, rank: int, size: int, deadline: float) -> None:
    """Collective. Wait until all ranks are there, and see that they belong together. Where one sees a mistake, all raise."""
    expected = int(store.compare_set("size", "", str(size)))
    if expected != size:
        store.set("problem", f"{place}: expected the same number of processes on all ranks, got {expected} and {size}")
    elif store.add(f"rank.{rank}", 1) > 1:
        store.set(
            "problem", f"{place}: expected ranks that are all different, got rank {rank} twice (or another job that meets there)"
        )
    told = False
    started = time.monotonic()
    while not store.check(["problem"]):
        missing = [str(other) for other in range(size) if not store.check([f"rank.{other}"])]
        if not missing:
            return
        if not told and rank == 0 and time.monotonic() - started > TELL_AFTER:
            sys.stderr.write(f"rank 0 waits at {place} for rank {', '.join(missing)} of {size}\n")  # the log is not open yet
            told = True
        if time.monotonic() >= deadline:
            store.set("problem", f"{place}: expected {size} processes, got none with rank {', '.join(missing)} in time")
        time.sleep(PAUSE)
    problem = store.get("problem").decode()
    store.add("knows_the_problem", 1)
    if rank == 0:
        time.sleep(1)  # the store goes with this process, and the others have to read it
    raise LaunchError(problem)


@contextmanager
def _quiet_port(port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise LaunchError(
            f"expected port {port} of this host to be free for rank 0, got one in use (another job? rank 0 started twice? "
            "MASTER_PORT or init_method choose another)"
        ) from None


def _names_of_this_host() -> list[str]:
    """Under what the other ranks may find this host: its name, its addresses, and for those on the same host, itself."""
    name = socket.gethostname()
    try:
        addresses = [str(found[4][0]) for found in socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)]
    except OSError:
        addresses = []
    outside = [address for address in addresses if not address.startswith(("127.", "::1"))]
    return list(dict.fromkeys([name, *outside, "127.0.0.1"]))
