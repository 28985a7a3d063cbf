"""What training takes on other numbers of ranks: a model of a step, from what was measured on a few. Pure functions.

A step is the sum of what a rank computes, what it waits for ranks with larger batches, for ranks that are late by chance and for
a rank that is always slow, what it waits for the exchange, and what it waits for data. docs/performance.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, pstdev

import numpy

from hvdtrain.data.types import Array
from hvdtrain.training.keys import Placement

BACKWARD = 2 / 3
"""The share of a step's computing in which gradients can be sent: backward takes about twice as long as forward."""

NEARLY = 0.95
"""A method is as good as the fastest one from this share of its speed on."""

MUCH = 0.1
"""A share of the step from which something other than computing limits it."""


@dataclass(frozen=True)
class Method:
    """How the ranks train together: gradients are reduced in every update, or parameters are averaged after `every` updates."""

    every: int | None = None

    def __str__(self) -> str:
        return "grad" if self.every is None else f"param, H = {self.every}"


METHODS = (Method(), Method(1), Method(16), Method(64))
"""In the order in which one prefers them: the later, the less the ranks know of each other."""


@dataclass(frozen=True)
class Exchange:
    """What the exchange between the measured ranks takes.

    Attributes:
        latency: seconds of the all-reduce of a few bytes.
        bucket_bytes: of the messages in which gradients are sent.
        bucket_seconds: of the all-reduce of such a message.
        parameters_seconds: of the all-reduce of all parameters at once.
        waited: how much longer a step takes with the exchange of gradients, as a share of the time of their all-reduce: 0 if
            computing hides all of it; more than 1 if it slows the computing down.
    """

    latency: float
    bucket_bytes: int
    bucket_seconds: float
    parameters_seconds: float
    waited: float


@dataclass(frozen=True)
class Measured:
    """What was measured on some ranks. Seconds of a step are without any exchange.

    Attributes:
        size: the number of ranks.
        per_host: ranks on each host.
        hosts: the number of hosts.
        cores: of a host.
        threads: with which a rank computes wherever it is; None: the cores of a host divided among its ranks.
        on_cpu: whether computing takes cores.
        fixed: seconds of a step, whatever the size of its batch.
        per_frame: seconds for each padded frame of its batch.
        jitter: seconds by which steps took longer or shorter than that, on any rank; their mean is 0.
        slow_rank: seconds by which every step takes longer on the slowest rank, if one is slow; 0: none is.
        reading_per_frame: seconds of reading for each padded frame, in the background.
        parameters: bytes of the trained parameters.
        steps_per_update: whose gradients are accumulated.
        exchange: None: there is one rank.
    """

    size: int
    per_host: int
    hosts: int
    cores: int
    threads: int | None
    on_cpu: bool
    fixed: float
    per_frame: float
    jitter: tuple[float, ...]
    slow_rank: float
    reading_per_frame: float
    parameters: int
    steps_per_update: int
    exchange: Exchange | None


@dataclass(frozen=True)
class Work:
    """An epoch. Attributes: costs: the padded frames of its batches, in their order; num_sequences: in all of them together."""

    costs: Array
    num_sequences: int


@dataclass(frozen=True)
class Prediction:
    """The mean step of an epoch, in seconds of a rank.

    Attributes:
        computing: of the ranks' mean.
        idle: of ranks without a batch, in the last step of the epoch.
        batches: waiting for ranks with larger batches.
        jitter: waiting for ranks that are late by chance.
        slow_rank: waiting for the rank that is always slow.
        network: waiting for the exchange; None: it was not measured.
        data: waiting for batches.
        rate: sequences per second of all ranks together.
        speed_up: the rate compared with that of one rank, alone on a host.
    """

    placement: Placement
    method: Method
    computing: float
    idle: float
    batches: float
    jitter: float
    slow_rank: float
    network: float | None
    data: float
    rate: float
    speed_up: float = 1.0

    @property
    def seconds(self) -> float:
        return self.computing + self.idle + self.batches + self.jitter + self.slow_rank + (self.network or 0.0) + self.data

    @property
    def stragglers(self) -> float:
        """The share of the step that ranks wait for others."""
        return (self.idle + self.batches + self.jitter + self.slow_rank) / self.seconds

    @property
    def limit(self) -> str:
        """What takes the largest part of the step beside computing, if it is large."""
        waits = {
            "network": self.network or 0.0,
            "data (reading)": self.data,
            "a slow rank": self.slow_rank,
            "too few batches": self.idle,
            "uneven batches": self.batches,
            "uneven steps": self.jitter,
        }
        name, most = max(waits.items(), key=lambda item: item[1])
        return name if most > MUCH * self.seconds else "computing"


def predict(measured: Measured, work: Mapping[int, Work], placements: Sequence[Placement]) -> list[Prediction]:
    """Predictions for each placement and method. On one rank, all methods are the same.

    Args:
        work: the epoch on each number of ranks, and on one.
    """
    alone = _predict(measured, work[1], Placement(1, 1), METHODS[0])
    found = []
    for placement in placements:
        for method in METHODS if placement.ranks > 1 else METHODS[:1]:
            made = _predict(measured, work[placement.ranks], placement, method)
            found.append(replace(made, speed_up=made.rate / alone.rate))
    return found


def best(predictions: Sequence[Prediction]) -> Prediction:
    """Of the predictions for one placement, the first that is nearly as fast as the fastest."""
    fastest = max(prediction.rate for prediction in predictions)
    return next(prediction for prediction in predictions if prediction.rate >= NEARLY * fastest)


def _predict(measured: Measured, work: Work, placement: Placement, method: Method) -> Prediction:
    ranks = placement.ranks
    rounds = -(-len(work.costs) // ranks)
    window = measured.steps_per_update * (method.every or 1)  # steps from one exchange to the next
    slower = slowdown(measured, placement.per_host or min(ranks, measured.per_host))
    batches = slower * (measured.fixed + measured.per_frame * work.costs)
    computing = float(batches.sum()) / (rounds * ranks)
    idle = float(batches.mean()) - computing
    largest = largest_share(batches, ranks, window)
    jitter = slower * expected_maximum(measured.jitter, ranks) / math.sqrt(min(window, rounds))
    slow_rank = slower * measured.slow_rank if ranks > 1 else 0.0
    network = waiting(measured, ranks, method, computing + idle) / min(window, rounds)
    reading = measured.reading_per_frame * float(work.costs.mean())
    known = ranks == 1 or measured.exchange is not None
    made = Prediction(
        placement=placement,
        method=method,
        computing=computing,
        idle=idle,
        batches=max(0.0, largest - computing - idle),
        jitter=jitter,
        slow_rank=slow_rank,
        network=network if known else None,
        data=max(0.0, reading - largest - jitter - slow_rank - network),
        rate=0.0,
    )
    return replace(made, rate=work.num_sequences / (rounds * made.seconds))


def is_extrapolated(measured: Measured, placement: Placement) -> bool:
    """Whether a prediction goes beyond what was measured."""
    return placement.ranks > measured.size


def slowdown(measured: Measured, per_host: int) -> float:
    """By which factor computing takes longer than measured, if this number of ranks shares the cores of a host."""
    return _cores_per_rank(measured, measured.per_host) / _cores_per_rank(measured, per_host) if measured.on_cpu else 1.0


def _cores_per_rank(measured: Measured, per_host: int) -> float:
    threads = measured.threads or max(1, measured.cores // per_host)
    return min(threads, measured.cores / per_host)


def largest_share(seconds: Array, ranks: int, window: int) -> float:
    """The mean, over the steps of an epoch, of the seconds of the rank that takes longest between two exchanges.

    Args:
        seconds: of every batch, in the order in which the ranks take them.
        window: the number of steps from one exchange to the next.

    >>> largest_share(numpy.array([1, 3, 3, 1]), 2, 1), largest_share(numpy.array([1, 3, 3, 1]), 2, 2)
    (3.0, 2.0)
    """
    rounds = -(-len(seconds) // ranks)
    of_ranks = numpy.pad(seconds.astype(float), (0, rounds * ranks - len(seconds))).reshape(rounds, ranks)
    together = numpy.add.reduceat(of_ranks, numpy.arange(0, rounds, window), axis=0)
    return float(together.max(axis=1).sum()) / rounds


def expected_maximum(samples: Sequence[float], count: int) -> float:
    """By how much the expected largest of `count` draws is larger than the mean.

    Drawn from the samples, as long as there are twice as many; the largest of more draws is larger than any sample, so it is
    at least that of a normal distribution then (Blom, 1958).

    >>> round(expected_maximum([-1.0, 1.0], 1), 3), round(expected_maximum([-1.0, 1.0], 2), 3)
    (0.0, 0.589)
    """
    if count == 1 or not samples:
        return 0.0
    ordered = numpy.sort(numpy.asarray(samples))
    edges = (numpy.arange(len(ordered) + 1) / len(ordered)) ** count
    drawn = float((ordered * numpy.diff(edges)).sum()) - fmean(samples)
    normal = pstdev(samples) * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
    return max(0.0, drawn if 2 * count <= len(ordered) else max(drawn, normal))


def waiting(measured: Measured, ranks: int, method: Method, computing: float) -> float:
    """The seconds that a rank waits for one exchange; 0 where none was measured."""
    exchange = measured.exchange
    if exchange is None or ranks == 1:
        return 0.0
    if method.every is not None:
        return travel(exchange, measured.size, ranks, 1, exchange.parameters_seconds - exchange.latency)
    whole = gradients_travel(measured, exchange, ranks)
    return max(exchange.waited * whole, whole - BACKWARD * computing)


def gradients_travel(measured: Measured, exchange: Exchange, ranks: int) -> float:
    """The seconds of the all-reduce of all gradients, message after message, with nothing else going on."""
    messages = measured.parameters / exchange.bucket_bytes
    return travel(exchange, measured.size, ranks, math.ceil(messages), messages * (exchange.bucket_seconds - exchange.latency))


def travel(exchange: Exchange, measured_ranks: int, ranks: int, messages: int, moving: float) -> float:
    """The seconds of an all-reduce: the latency of a message grows as in a tree of ranks, the bytes through each rank as in a
    ring, where they approach twice the message.

    Args:
        moving: seconds on the measured ranks without the latency of the messages.
    """
    latency = exchange.latency * math.log2(ranks) / math.log2(measured_ranks)
    through = ((ranks - 1) / ranks) / ((measured_ranks - 1) / measured_ranks)
    return messages * latency + max(0.0, moving) * through
