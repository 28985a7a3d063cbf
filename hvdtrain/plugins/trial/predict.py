"""Predicts the time of a step on other numbers of ranks from measurements on a few. Pure functions.

The time of a step is the sum of the rank's computing and of its waiting for ranks with larger batches, for ranks that are late by
chance, for a rank that is always slow, for the exchange, and for data. docs/performance.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, pstdev

import numpy

from hvdtrain.data.types import Array
from hvdtrain.plugins.trial.keys import Placement

BACKWARD = 2 / 3
"""The share of a step's computing in which gradients can be sent: backward takes about twice as long as forward."""

NEARLY_AS_FAST = 0.95
"""A method with at least this share of the fastest method's speed counts as equally fast."""

LARGE_SHARE = 0.1
"""A wait that takes more than this share of the step is called its limit."""


@dataclass(frozen=True)
class Method:
    """How the ranks train together: gradients are reduced in every update, or parameters are averaged after `every` updates."""

    every: int | None = None

    def __str__(self) -> str:
        return "grad" if self.every is None else f"param, H = {self.every}"


METHODS = (Method(), Method(1), Method(16), Method(64))
"""In the order of preference: with later methods, the ranks exchange less."""


@dataclass(frozen=True)
class Exchange:
    """The measured times of exchanges between the ranks.

    Attributes:
        latency: seconds of the all-reduce of a few bytes.
        bucket_bytes: the size of the messages in which gradients are sent.
        bucket_seconds: seconds of the all-reduce of such a message.
        parameters_seconds: seconds of the all-reduce of all parameters at once.
        waited: how much longer a step takes with the exchange of gradients, as a share of the time of their all-reduce: 0 if
            computing hides all of it; more than 1 if it slows down computing.
    """

    latency: float
    bucket_bytes: int
    bucket_seconds: float
    parameters_seconds: float
    waited: float


@dataclass(frozen=True)
class Measurement:
    """Measurements on some ranks. Seconds of a step exclude all exchanges.

    Attributes:
        size: the number of ranks.
        per_host: ranks on each host.
        hosts: the number of hosts.
        cores: the number of cores of a host.
        threads: the fixed number of threads of a rank; None: the cores of a host divided by its ranks.
        on_cpu: whether the ranks compute on the cores.
        fixed: seconds of a step, independent of the size of its batch.
        per_frame: seconds for each padded frame of its batch.
        jitter: seconds by which steps took longer or shorter than that, on any rank; their mean is 0.
        slow_rank: seconds by which every step takes longer on the slowest rank; 0: no rank is slow.
        reading_per_frame: seconds of reading for each padded frame, in the background.
        parameters: bytes of the trained parameters.
        steps_per_update: the number of steps whose gradients are accumulated.
        exchange: None if there is only one rank.
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
        computing: the mean over the ranks.
        idle: ranks without a batch, in the last step of the epoch.
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
        """The share of the step in which ranks wait for others."""
        return (self.idle + self.batches + self.jitter + self.slow_rank) / self.seconds

    @property
    def limit(self) -> str:
        """The largest wait of the step, or 'computing' if none is large."""
        waits = {
            "network": self.network or 0.0,
            "data (reading)": self.data,
            "a slow rank": self.slow_rank,
            "too few batches": self.idle,
            "uneven batches": self.batches,
            "uneven steps": self.jitter,
        }
        name, most = max(waits.items(), key=lambda item: item[1])
        return name if most > LARGE_SHARE * self.seconds else "computing"


def predict(measured: Measurement, work: Mapping[int, Work], placements: Sequence[Placement]) -> list[Prediction]:
    """Predictions for each placement and method; on one rank for the first method only, as all are the same.

    Args:
        work: the epoch by number of ranks, including one rank.
    """
    alone = _predict(measured, work[1], Placement(1, 1), METHODS[0])
    predictions = [
        _predict(measured, work[placement.ranks], placement, method)
        for placement in placements
        for method in (METHODS if placement.ranks > 1 else METHODS[:1])
    ]
    return [replace(prediction, speed_up=prediction.rate / alone.rate) for prediction in predictions]


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The first of the predictions for one placement that is nearly as fast as the fastest."""
    fastest = max(prediction.rate for prediction in predictions)
    return next(prediction for prediction in predictions if prediction.rate >= NEARLY_AS_FAST * fastest)


def _predict(measured: Measurement, work: Work, placement: Placement, method: Method) -> Prediction:
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
    network = exchange_wait(measured, ranks, method, computing + idle) / min(window, rounds)
    reading_seconds = measured.reading_per_frame * float(work.costs.mean())
    is_measured = ranks == 1 or measured.exchange is not None
    prediction = Prediction(
        placement=placement,
        method=method,
        computing=computing,
        idle=idle,
        batches=max(0.0, largest - computing - idle),
        jitter=jitter,
        slow_rank=slow_rank,
        network=network if is_measured else None,
        data=max(0.0, reading_seconds - largest - jitter - slow_rank - network),
        rate=0.0,
    )
    return replace(prediction, rate=work.num_sequences / (rounds * prediction.seconds))


def slowdown(measured: Measurement, per_host: int) -> float:
    """The factor by which computing takes longer than measured if this number of ranks shares the cores of a host."""
    return _cores_per_rank(measured, measured.per_host) / _cores_per_rank(measured, per_host) if measured.on_cpu else 1.0


def _cores_per_rank(measured: Measurement, per_host: int) -> float:
    threads = measured.threads or max(1, measured.cores // per_host)
    return min(threads, measured.cores / per_host)


def largest_share(seconds: Array, ranks: int, window: int) -> float:
    """The seconds of the slowest rank between two exchanges, as the mean over the steps of an epoch.

    Args:
        seconds: the seconds of every batch, in the order of the plan.
        window: the number of steps from one exchange to the next.

    >>> largest_share(numpy.array([1, 3, 3, 1]), 2, 1), largest_share(numpy.array([1, 3, 3, 1]), 2, 2)
    (3.0, 2.0)
    """
    rounds = -(-len(seconds) // ranks)
    of_ranks = numpy.pad(seconds.astype(float), (0, rounds * ranks - len(seconds))).reshape(rounds, ranks)
    together = numpy.add.reduceat(of_ranks, numpy.arange(0, rounds, window), axis=0)
    return float(together.max(axis=1).sum()) / rounds


def expected_maximum(samples: Sequence[float], count: int) -> float:
    """By how much the expected maximum of `count` draws exceeds the mean.

    The draws are from the samples. If these are fewer than twice the draws, their maximum is too small an estimate, so the result
    is at least that of a normal distribution (Blom, 1958).

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


def exchange_wait(measured: Measurement, ranks: int, method: Method, computing: float) -> float:
    """The seconds that a rank waits for one exchange; 0 if none was measured."""
    exchange = measured.exchange
    if exchange is None or ranks == 1:
        return 0.0
    if method.every is not None:
        return all_reduce_seconds(exchange, measured.size, ranks, 1, exchange.parameters_seconds - exchange.latency)
    whole = gradient_exchange_seconds(measured, exchange, ranks)
    return max(exchange.waited * whole, whole - BACKWARD * computing)


def gradient_exchange_seconds(measured: Measurement, exchange: Exchange, ranks: int) -> float:
    """The seconds of the all-reduce of all gradients, message after message, while nothing else is computed or sent."""
    messages = measured.parameters / exchange.bucket_bytes
    moving = messages * (exchange.bucket_seconds - exchange.latency)
    return all_reduce_seconds(exchange, measured.size, ranks, math.ceil(messages), moving)


def all_reduce_seconds(exchange: Exchange, measured_ranks: int, ranks: int, messages: int, moving: float) -> float:
    """The seconds of an all-reduce: the latency of a message grows as in a tree of ranks, and the bytes that pass through each
    rank as in a ring, where they approach twice the message.

    Args:
        moving: seconds on the measured ranks, excluding the latency of the messages.
    """
    latency = exchange.latency * math.log2(ranks) / math.log2(measured_ranks)
    through = ((ranks - 1) / ranks) / ((measured_ranks - 1) / measured_ranks)
    return messages * latency + max(0.0, moving) * through
