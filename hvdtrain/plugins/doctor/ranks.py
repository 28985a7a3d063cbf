"""All ranks of a launch: every host's report on rank 0, findings from comparing hosts and ranks, and the speed of all-reduces."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from types import TracebackType

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator, SingleCommunicator, together
from hvdtrain.data.files import size_text
from hvdtrain.data.types import Batch
from hvdtrain.errors import HvdtrainError
from hvdtrain.learner.base import Learner
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.plugins.doctor.findings import Finding, HostReport, check_clocks, check_networks, differences, ok, problem, warning
from hvdtrain.plugins.doctor.network import cannot_connect
from hvdtrain.plugins.doctor.resources import MEGABYTE, check_shared_cores
from hvdtrain.plugins.trial.scaling import SMALL, all_reduce_seconds, parameters_of
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
    if this_process.place().launcher == "torchrun":
        from hvdtrain.comm.torch_dist import open_torch_distributed  # imports the framework

        comm = open_torch_distributed(None, None, PATIENCE_AMONG_RANKS)
    else:
        from hvdtrain.plugins.horovod.communicator import open_horovod

        comm = open_horovod(framework)
    yield comm
    comm.close()


def gather_reports(comm: Communicator, own: RankReport) -> tuple[list[HostReport], list[Finding]]:
    """Collective. Every host's report, and the findings from comparing hosts and ranks."""
    ranks = comm.gather(own, name="doctor.reports")
    comm.gather(None, name="doctor.now")  # a barrier: all ranks leave it at about the same time
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
        on_host = [(f"rank {number}", rank) for number, rank in enumerate(ranks) if rank.host == host]
        first = on_host[0][1]
        findings += check_shared_cores([(name, rank.cores) for name, rank in on_host], first.host_cores, first.threads)
        if len(on_host) != first.local_size:
            text = f"expected {first.local_size} ranks on {host}, as the launcher says, got {len(on_host)}"
            findings.append(warning("ranks", text, "use one launcher only; every host needs a unique name"))
    return findings


def check_connections(comm: Communicator, own: RankReport) -> list[Finding]:
    """Collective. Whether every host can connect to every other one on a free port, over the interface that NCCL picks."""
    with socket.socket(socket.AF_INET6 if ":" in (own.report.address if own.report else "") else socket.AF_INET) as listener:
        place = None
        if own.report is not None and own.report.address:
            listener.bind((own.report.address.split()[1].split("/")[0], 0))
            listener.listen(comm.size)
            place = (own.host, *listener.getsockname()[:2])
        places = [other for other in comm.gather(place, name="doctor.places") if other is not None]
        failures = []
        if place is not None:
            for host, address, port in places:
                if host != own.host:
                    error = cannot_connect(address, port)
                    failures += [f"{own.host} to {host} ({address}): {error}"] if error else []
        all_failures = [failure for found in comm.gather(failures, name="doctor.connections") for failure in found]
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


class Deadline:
    """Ends this process if the `with` block takes too long, as a blocked collective cannot be interrupted."""

    def __init__(self, seconds: float, at_timeout: Callable[[], object]) -> None:
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._at_timeout = at_timeout

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self._at_timeout()
        os._exit(2)


def this_rank(environ: Mapping[str, str], local_size: int, report: HostReport | None) -> RankReport:
    """The report of this rank."""
    threads = environ.get("OMP_NUM_THREADS", "")
    return RankReport(
        socket.gethostname(),
        local_size,
        tuple(sorted(os.sched_getaffinity(0))),
        os.cpu_count() or 1,
        int(threads) if threads.isdigit() else None,
        report,
    )


LARGE = 64 * MEGABYTE
"""Bytes of the tensor that measures bandwidth."""

SECONDS = 1.0
"""The approximate duration of a measurement, unless the command says otherwise."""

TURNS = 3
"""How many times steps with and without exchange alternate."""

BATCHES = 4
"""The number of different batches to train on in turn."""

MUCH = 0.3
"""The share of a step that the exchange may take before it is worth a warning."""


@dataclass(frozen=True)
class Speed:
    """What an all-reduce costs, in seconds and bytes per second.

    Attributes:
        bandwidth: of a rank's connection: an all-reduce of n ranks moves 2 (n - 1) / n of its bytes through each.
    """

    latency: float
    bandwidth: float


def measure_speed(comm: Communicator, framework: str, seconds: float = SECONDS) -> Speed:
    """Collective. All-reduce small and large tensors, for about `seconds`."""
    tensors = FRAMEWORKS[framework].tensors
    small, large = (tensors.zeros(size // 4, comm.local_rank) for size in (SMALL, LARGE))
    latency = all_reduce_seconds(comm, tensors, lambda: [small], "doctor.small", seconds)
    whole = all_reduce_seconds(comm, tensors, lambda: [large], "doctor.large", seconds)
    return Speed(latency, LARGE * 2 * (comm.size - 1) / comm.size / whole)


def check_speed(speed: Speed) -> Finding:
    """The measurement in words."""
    latency, bandwidth = f"{1e6 * speed.latency:.0f} us", f"{speed.bandwidth / 1e6:.0f} MB/s"
    return ok("all-reduce", f"{latency} for {SMALL} bytes, {bandwidth} through each rank for {size_text(LARGE)}")


@dataclass(frozen=True)
class Share:
    """The parts of a training step, as measured on the slowest rank.

    Attributes:
        alone: seconds of a step without any exchange.
        together: seconds of a step with the exchange of gradients; None where parameters are averaged instead.
        model: bytes of the trained parameters.
        travel: seconds of their all-reduce with nothing else going on.
        every: steps from one averaging to the next; 1 where gradients are reduced.
    """

    alone: float
    together: float | None
    model: int
    travel: float
    every: int

    @property
    def exchange(self) -> float:
        """The share of a step that the ranks wait for each other.

        >>> Share(alone=0.03, together=0.04, model=1, travel=0.02, every=1).exchange
        0.25
        >>> Share(alone=0.03, together=None, model=1, travel=1.0, every=100).exchange
        0.25
        """
        whole = self.alone + self.travel / self.every if self.together is None else self.together
        return max(0.0, round(1 - self.alone / whole, 6))


def measure_share(comm: Communicator, settings: Settings, length: float = SECONDS) -> Share:
    """Collective. Train some steps with and without the other ranks, on models that are thrown away. Raises: HvdtrainError.

    Args:
        length: the seconds of all steps of a model, about, and of the all-reduces.
    """
    averaging = settings.reduce.reduce_type == "param"
    apart = SingleCommunicator(comm.local_rank, comm.local_size)
    with open_session(settings, "measure", comm) as session, open_session(settings, "measure", apart) as alone:
        train = session.feeds[0]
        plan = train.plan(1)
        share = (train.rank_batches(plan) or plan.rank_batches(0, 1))[:BATCHES]
        with train.read(share, epoch=1) as batches:
            read = [batch for batch in batches if batch.if_any]
        seconds = _step_seconds(comm, [alone.learner] if averaging else [alone.learner, session.learner], read, length)
        parameters = parameters_of(alone.learner)
        tensors = FRAMEWORKS[settings.run.backend].tensors
        travel = all_reduce_seconds(comm, tensors, lambda: [value * 1 for value in parameters], "doctor.parameters", length)
    every = getattr(settings.reduce, "sync_steps", 1) if averaging else 1
    return Share(seconds[0], None if averaging else seconds[1], sum(map(tensors.size, parameters)), travel, every)


def check_share(share: Share) -> list[Finding]:
    """The share in words, with advice where it is large."""
    model = f"the model's {size_text(share.model)} travel in {1e3 * share.travel:.1f} ms"
    step = f"{1e3 * share.alone:.1f} ms without exchange"
    if share.together is None:
        text = f"{step}; {model}, every {share.every} steps: {share.exchange:.0%} of a step"
    else:
        text = f"{step}, {1e3 * share.together:.1f} ms with it, which is {share.exchange:.0%} of a step; alone, {model}"
    if share.exchange <= MUCH:
        return [ok("training step", text)]
    fix = "larger batches; a faster network or NCCL; horovod_reduce_type = 'param' with horovod_param_sync_step = 100"
    return [warning("training step", text, fix)]


def _step_seconds(comm: Communicator, learners: Sequence[Learner], read: Sequence[Batch], length: float) -> list[float]:
    """Collective. By learner, the seconds of a step on the slowest rank. Learners alternate: other programs disturb both."""
    source = cycle(read)

    def train(learner: Learner, steps: int) -> float:
        learner.meter.take_step_seconds()
        for batch in islice(source, steps):
            learner.backward(batch)
            learner.update(0.0)
        return learner.meter.take_step_seconds() / steps

    for learner in learners:
        learner.begin_epoch(1, 0)
        train(learner, 2)  # memory is allocated, kernels are chosen
    first = max(train(learners[0], 2), 1e-3)
    steps = comm.gather(min(20, max(1, int(length / TURNS / first))), name="doctor.steps")[0]
    turns = [[train(learner, steps) for learner in learners] for _ in range(TURNS)]
    medians = [statistics.median(times) for times in zip(*turns, strict=True)]
    return [max(times) for times in zip(*comm.gather(medians, name="doctor.step_seconds"), strict=True)]
