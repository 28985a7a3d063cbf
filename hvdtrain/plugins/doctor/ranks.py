"""All ranks of a launch: every host's report on rank 0, findings from comparing hosts and ranks, and the speed of all-reduces."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

import numpy

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator, together
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.files import size_text
from hvdtrain.errors import HvdtrainError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.plugins.doctor.findings import Finding, HostReport, check_clocks, check_networks, differences, ok, problem, warning
from hvdtrain.plugins.doctor.network import cannot_connect
from hvdtrain.plugins.doctor.resources import MEGABYTE, check_shared_cores
from hvdtrain.plugins.trial.scaling import SMALL, TURNS, all_reduce_seconds, parameters_of, step_seconds, warm_up
from hvdtrain.settings import Settings
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.ranks import open_communicator

PATIENCE_AMONG_RANKS = 600.0
"""Seconds that a collective may take: one rank per host examines the host while the others wait."""


@dataclass(frozen=True)
class RankReport:
    """A rank's own findings.

    Attributes:
        report: its host's report, on one rank per host; None on the others.
        threads: OMP_NUM_THREADS.
        cores: the numbers of the cores that it may use.
    """

    report: HostReport | None
    local_size: int
    threads: int | None
    host: str = field(default_factory=socket.gethostname)
    cores: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(os.sched_getaffinity(0))))
    host_cores: int = field(default_factory=lambda: os.cpu_count() or 1)


@contextmanager
def connect(settings: Settings | None, framework: str) -> Iterator[Communicator]:
    """Collective. The ranks of this launch, as the config connects them; without one by torch.distributed under torchrun, else
    by Horovod. Raises: LaunchError.
    """
    if settings is not None:
        with open_communicator(settings) as comm:
            yield comm
        return
    if this_process.place().launcher == "torchrun":
        from hvdtrain.comm.torch_dist import open_torch_distributed  # imports the framework

        comm = open_torch_distributed(None, None, PATIENCE_AMONG_RANKS)
    else:
        from hvdtrain.plugins.horovod.communicator import open_horovod

        comm = open_horovod(framework)
    yield comm
    comm.close()


def gather_reports(comm: Communicator, mine: RankReport) -> tuple[list[HostReport], list[Finding]]:
    """Collective. Every host's report, and the findings from comparing hosts and ranks."""
    ranks = comm.gather(mine, name="doctor.reports")
    comm.gather(None, name="doctor.now")  # a barrier: all ranks leave it at about the same time
    clocks = comm.gather(time.time(), name="doctor.clocks")
    reports = [replace(rank.report, clock=clock) for rank, clock in zip(ranks, clocks, strict=True) if rank.report is not None]
    findings = [*differences(reports), *check_clocks(reports), *check_networks(reports), *check_cores(ranks)]
    return reports, [*findings, *check_connections(comm, mine)]


def check_cores(ranks: Sequence[RankReport]) -> list[Finding]:
    """Whether the ranks of each host have cores to compute on."""
    findings = []
    for host in dict.fromkeys(rank.host for rank in ranks):
        on_host = [(f"rank {number}", rank) for number, rank in enumerate(ranks) if rank.host == host]
        first = on_host[0][1]
        findings += check_shared_cores([(name, rank.cores) for name, rank in on_host], first.host_cores, first.threads)
        if len(on_host) != first.local_size:
            text = f"expected {first.local_size} ranks on {host}, as the launcher says, got {len(on_host)}"
            findings.append(warning("ranks", text, "use one launcher only; every host needs a unique name"))
    return findings


def check_connections(comm: Communicator, mine: RankReport) -> list[Finding]:
    """Collective. Whether every host can connect to every other one on a free port, over the interface that NCCL picks."""
    with socket.socket(socket.AF_INET6 if ":" in (mine.report.address if mine.report else "") else socket.AF_INET) as listener:
        place = None
        if mine.report is not None and mine.report.address:
            listener.bind((mine.report.address.split()[1].split("/")[0], 0))
            listener.listen(comm.size)
            place = (mine.host, *listener.getsockname()[:2])
        places = [address_there for address_there in comm.gather(place, name="doctor.places") if address_there is not None]
        failures = []
        for host, address, port in places if place is not None else ():
            if host != mine.host and (error := cannot_connect(address, port)):
                failures.append(f"{mine.host} to {host} ({address}): {error}")
        all_failures = [failure for listed in comm.gather(failures, name="doctor.connections") for failure in listed]
    if all_failures:
        fix = "open the firewall between the hosts, or choose another interface with NCCL_SOCKET_IFNAME"
        return [problem("connections", failure, fix) for failure in all_failures]
    if len(places) > 1:
        return [ok("connections", f"each of {len(places)} hosts reaches each other one")]
    return []


def run_check(comm: Communicator, about: str, work: Callable[[], list[Finding]]) -> list[Finding]:
    """Collective. The findings of `work`; if it fails on a rank, its error as a finding."""
    try:
        return together(comm, work, name=f"doctor.{about}")
    except HvdtrainError as error:
        return [problem(about, str(error), "training would stop with the same error")]


@contextmanager
def deadline(seconds: float, at_timeout: Callable[[], object]) -> Iterator[None]:
    """Ends this process if the `with` block takes too long, as a blocked collective cannot be interrupted."""

    def end() -> None:
        at_timeout()
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


LARGE = 64 * MEGABYTE
"""Bytes of the tensor that measures bandwidth."""

SECONDS = 1.0
"""The approximate duration of a measurement, unless the command says otherwise."""

BATCHES = 4
"""The number of different batches to train on in turn."""

MOST = 20
"""The most steps of a measurement."""

MUCH = 0.3
"""The share of a step that the exchange may take before it is worth a warning."""


def check_speed(comm: Communicator, framework: str, seconds: float = SECONDS) -> Finding:
    """Collective. What an all-reduce of a small and of a large tensor costs, measured for about `seconds`."""
    tensors = FRAMEWORKS[framework].tensors
    small, large = (tensors.zeros(size // 4, comm.local_rank) for size in (SMALL, LARGE))
    latency = all_reduce_seconds(comm, tensors, lambda: [small], "doctor.small", seconds)
    whole = all_reduce_seconds(comm, tensors, lambda: [large], "doctor.large", seconds)
    through = LARGE * 2 * (comm.size - 1) / comm.size / whole  # each rank sends 2 (n - 1) / n of the bytes of an all-reduce
    text = f"{1e6 * latency:.0f} us for {SMALL} bytes, {through / 1e6:.0f} MB/s through each rank for {size_text(LARGE)}"
    return ok("all-reduce", text)


def check_share(comm: Communicator, settings: Settings, length: float = SECONDS) -> list[Finding]:
    """Collective. The share of a training step in which ranks wait for each other: some steps are trained with and without the
    other ranks, on models that are thrown away. Raises: HvdtrainError.

    Args:
        length: the seconds of all steps of a model, about, and of the all-reduces.
    """
    averaging = settings.reduce.reduce_type == "param"
    apart = SingleCommunicator(comm.local_rank, comm.local_size)
    with open_session(settings, "measure", comm) as session, open_session(settings, "measure", apart) as alone:
        train = session.feeds[0]
        plan = train.plan(1)
        with train.read((train.rank_batches(plan) or plan.rank_batches(0, 1))[:BATCHES], epoch=1) as batches:
            read = [batch for batch in batches if batch.if_any]
        learners = [alone.learner] if averaging else [alone.learner, session.learner]
        first, *_ = [warm_up(learner, read[0]) for learner in learners]
        steps = comm.gather(min(MOST, max(1, int(length / TURNS / max(first, 1e-3)))), name="doctor.steps")[0]
        measured = step_seconds(comm, learners, [list(islice(cycle(read), steps))] * len(learners))
        seconds = [float(numpy.median(of_ranks, axis=(1, 2)).max()) for of_ranks in measured]
        parameters = parameters_of(alone.learner)
        tensors = FRAMEWORKS[settings.run.backend].tensors
        travel = all_reduce_seconds(comm, tensors, lambda: [value * 1 for value in parameters], "doctor.parameters", length)
    every = getattr(settings.reduce, "sync_steps", 1)
    whole = seconds[0] + travel / every if averaging else seconds[1]
    share = max(0.0, 1 - seconds[0] / whole)
    text = f"{1e3 * seconds[0]:.1f} ms without exchange"
    model = f"the model's {size_text(sum(map(tensors.size, parameters)))} travel in {1e3 * travel:.1f} ms"
    if averaging:
        text += f"; {model}, every {every} steps: {share:.0%} of a step"
    else:
        text += f", {1e3 * whole:.1f} ms with it, which is {share:.0%} of a step; alone, {model}"
    if share <= MUCH:
        return [ok("training step", text)]
    fix = "larger batches; a faster network or NCCL; horovod_reduce_type = 'param' with horovod_param_sync_step = 100"
    return [warning("training step", text, fix)]
