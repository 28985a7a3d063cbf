"""All ranks of a launch: every host's report on rank 0, and what can only be seen together."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from hvdtrain.comm import launch
from hvdtrain.comm.base import Communicator, together
from hvdtrain.comm.horovod import open_horovod
from hvdtrain.doctor.findings import Finding, HostReport, check_clocks, check_networks, differences, ok, problem, warning
from hvdtrain.doctor.resources import check_shared_cores
from hvdtrain.errors import HvdtrainError
from hvdtrain.session import open_communicator
from hvdtrain.settings import Settings

PATIENCE = 3.0
"""Seconds to wait for a connection to another host."""

PATIENCE_AMONG_RANKS = 600.0
"""Seconds that a collective may take: one rank of a host looks at it while the others wait."""


@dataclass(frozen=True)
class RankReport:
    """What a rank knows.

    Attributes:
        report: its host's; of one rank a host, the others have None.
        cores: the numbers of the cores that it may use.
        threads: OMP_NUM_THREADS.
    """

    host: str
    local_size: int
    cores: tuple[int, ...]
    host_cores: int
    threads: int | None
    report: HostReport | None


@contextmanager
def connect(settings: Settings | None, framework: str) -> Iterator[Communicator]:
    """Collective. The ranks of this launch, as the config connects them; without one by torch.distributed under torchrun, else
    by Horovod. Raises: LaunchError.
    """
    if settings is not None:
        with open_communicator(settings) as comm:
            yield comm
        return
    if launch.launch().launcher == "torchrun":
        from hvdtrain.comm.torch_dist import open_torch_distributed  # imports the framework

        comm = open_torch_distributed(None, None, PATIENCE_AMONG_RANKS)
    else:
        comm = open_horovod("torch" if framework == "torch" else "tensorflow")
    yield comm
    comm.close()


def gather_reports(comm: Communicator, own: RankReport) -> tuple[list[HostReport], list[Finding]]:
    """Collective. Every host's report, and what is found by comparing hosts and ranks."""
    ranks = comm.gather(own, name="doctor.reports")
    comm.gather(None, name="doctor.now")  # all leave this at about the same moment
    clocks = comm.gather(time.time(), name="doctor.clocks")
    reports = []
    for rank, clock in zip(ranks, clocks, strict=True):
        if rank.report is not None:
            rank.report.clock = clock
            reports.append(rank.report)
    findings = [*differences(reports), *check_clocks(reports), *check_networks(reports), *check_cores(ranks)]
    return reports, [*findings, *check_connections(comm, own)]


def check_cores(ranks: Sequence[RankReport]) -> list[Finding]:
    """Whether the ranks of each host have cores to compute on."""
    findings = []
    for host in dict.fromkeys(rank.host for rank in ranks):
        here = [(f"rank {number}", rank) for number, rank in enumerate(ranks) if rank.host == host]
        first = here[0][1]
        findings += check_shared_cores([(name, rank.cores) for name, rank in here], first.host_cores, first.threads)
        if len(here) != first.local_size:
            text = f"the launcher says {first.local_size} ranks on {host}, but {len(here)} are there"
            findings.append(warning("ranks", text, "one launcher only; every host with a name of its own"))
    return findings


def check_connections(comm: Communicator, own: RankReport) -> list[Finding]:
    """Collective. Whether every host can connect to every other one on a free port, over the interface that NCCL picks."""
    with socket.socket(socket.AF_INET6 if ":" in (own.report.address if own.report else "") else socket.AF_INET) as listener:
        place = None
        if own.report is not None and own.report.address:
            listener.bind((own.report.address.split()[1].split("/")[0], 0))
            listener.listen(comm.size)
            place = (own.host, *listener.getsockname()[:2])
        places = [each for each in comm.gather(place, name="doctor.places") if each is not None]
        failures = []
        if place is not None:
            for host, address, port in places:
                if host != own.host:
                    error = cannot_connect(address, port)
                    failures += [f"{own.host} to {host} ({address}): {error}"] if error else []
        all_failures = [failure for each in comm.gather(failures, name="doctor.connections") for failure in each]
    if all_failures:
        fix = "open the firewall between the hosts, or choose another interface with NCCL_SOCKET_IFNAME"
        return [problem("connections", failure, fix) for failure in all_failures]
    if len(places) > 1:
        return [ok("connections", f"each of {len(places)} hosts reaches each other one")]
    return []


def cannot_connect(address: str, port: int) -> str | None:
    """Why a port of another host cannot be reached, or None if it can."""
    try:
        socket.create_connection((address, port), timeout=PATIENCE).close()
        return None
    except OSError as error:
        return str(error)


def measured(comm: Communicator, about: str, work: Callable[[], list[Finding]]) -> list[Finding]:
    """Collective. What `work` finds; where it fails on a rank, that."""
    try:
        return together(comm, work, name=f"doctor.{about}")
    except HvdtrainError as error:
        return [problem(about, str(error), "training would stop with the same error")]


class Deadline:
    """Ends this process with a last word if the `with` block takes too long: a collective that waits cannot be interrupted."""

    def __init__(self, seconds: float, last_word: Callable[[], object]) -> None:
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._last_word = last_word

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self._last_word()
        os._exit(2)


def own_rank(environ: Mapping[str, str], local_size: int, report: HostReport | None) -> RankReport:
    """This rank, as it sees itself."""
    threads = environ.get("OMP_NUM_THREADS", "")
    return RankReport(
        socket.gethostname(),
        local_size,
        tuple(sorted(os.sched_getaffinity(0))),
        os.cpu_count() or 1,
        int(threads) if threads.isdigit() else None,
        report,
    )
