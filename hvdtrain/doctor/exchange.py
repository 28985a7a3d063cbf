"""How fast tensors travel between the ranks, and what share of a training step that takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from types import ModuleType
from typing import Any

from hvdtrain.comm.base import Communicator, SingleCommunicator, Tensor, all_reduce
from hvdtrain.data.files import size_text
from hvdtrain.data.types import Batch
from hvdtrain.doctor.findings import Finding, ok, warning
from hvdtrain.doctor.resources import MEGABYTE
from hvdtrain.learner.base import Learner
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.session import open_session
from hvdtrain.settings import Settings

SMALL, LARGE = 4, 64 * MEGABYTE
"""Bytes: what tells the latency, and what tells the bandwidth."""

SECONDS = 2.0
"""How long a measurement takes, about."""

TURNS = 3
"""So often the steps with and without exchange take turns."""

BATCHES = 4
"""So many different batches are trained on in turn."""

MUCH = 0.3
"""A share of the step from which something should be done."""


@dataclass(frozen=True)
class Speed:
    """What an all-reduce costs, in seconds and bytes per second.

    Attributes:
        bandwidth: of a rank's connection: an all-reduce of n ranks moves 2 (n - 1) / n of its bytes through each.
    """

    latency: float
    bandwidth: float


def measure_speed(comm: Communicator, framework: str) -> Speed:
    """Collective. All-reduce small and large tensors for some seconds."""
    tensors = FRAMEWORKS[framework].tensors
    small, large = (tensors.zeros(size // 4, comm.local_rank) for size in (SMALL, LARGE))
    latency = all_reduce_seconds(comm, tensors, lambda: [small], "doctor.small")
    whole = all_reduce_seconds(comm, tensors, lambda: [large], "doctor.large")
    return Speed(latency, LARGE * 2 * (comm.size - 1) / comm.size / whole)


def check_speed(speed: Speed) -> Finding:
    """The two figures in words."""
    latency, bandwidth = f"{1e6 * speed.latency:.0f} us", f"{speed.bandwidth / 1e6:.0f} MB/s"
    return ok("all-reduce", f"{latency} for {SMALL} bytes, {bandwidth} through each rank for {size_text(LARGE)}")


@dataclass(frozen=True)
class Share:
    """What a training step is made of. All of it was measured, on the slowest rank.

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


def measure_share(comm: Communicator, settings: Settings) -> Share:
    """Collective. Train some steps with and without the other ranks, on models that are thrown away. Raises: HvdtrainError."""
    averaging = settings.reduce.horovod_reduce_type == "param"
    apart = SingleCommunicator(comm.local_rank, comm.local_size)
    with open_session(settings, "measure", comm) as session, open_session(settings, "measure", apart) as alone:
        train = session.feeds[0]
        plan = train.plan(1)
        share = (train.share(plan) or plan.share(0, 1))[:BATCHES]
        with train.read(share, epoch=1) as batches:
            read = list(batches)
        seconds = _step_seconds(comm, [alone.learner] if averaging else [alone.learner, session.learner], read)
        parameters = parameters_of(alone.learner)
        tensors = FRAMEWORKS[settings.run.backend].tensors
        travel = all_reduce_seconds(comm, tensors, lambda: [value * 1 for value in parameters], "doctor.parameters")
    every = settings.reduce.horovod_param_sync_step if averaging else 1
    return Share(seconds[0], None if averaging else seconds[1], sum(map(tensors.size, parameters)), travel, every)


def parameters_of(learner: Learner) -> list[Tensor]:
    """The trained parameters, themselves."""
    parameters: list[Tensor] = []

    def note(values: list[Tensor]) -> list[Tensor]:
        parameters.extend(values)
        return values

    learner.state.map_tensors("parameters", note)
    return parameters


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


def _step_seconds(comm: Communicator, learners: Sequence[Learner], read: Sequence[Batch]) -> list[float]:
    """Collective. For each learner, the seconds of a step on the slowest rank. They take turns: other programs disturb both."""
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
    steps = comm.gather(min(20, max(1, int(SECONDS / TURNS / first))), name="doctor.steps")[0]
    turns = [[train(learner, steps) for learner in learners] for _ in range(TURNS)]
    medians = [statistics.median(times) for times in zip(*turns, strict=True)]
    return [max(times) for times in zip(*comm.gather(medians, name="doctor.step_seconds"), strict=True)]


def all_reduce_seconds(comm: Communicator, tensors: ModuleType, make: Callable[[], list[Any]], name: str) -> float:
    """Collective. The median over some all-reduces of the slowest rank's seconds."""

    def once() -> float:
        sent = make()
        started = time.perf_counter()
        tensors.wait_for(all_reduce(comm, sent, "sum", name=name)[-1])
        return time.perf_counter() - started

    once()
    first = once()
    times = comm.gather(min(200, max(5, int(SECONDS / 2 / max(first, 1e-5)))), name=f"{name}.times")[0]
    seconds = [once() for _ in range(times)]
    return max(comm.gather(statistics.median(seconds), name=f"{name}.seconds"))
