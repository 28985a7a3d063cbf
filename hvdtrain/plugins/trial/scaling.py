"""The speed on other numbers of ranks: measurements for `plugins/trial/predict.py`, and its predictions in words."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator, Tensor, all_reduce, on_rank_zero
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.feed import Feed
from hvdtrain.data.files import size_text
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import DataError
from hvdtrain.learner.base import Learner
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.learner.steps import steps_per_update
from hvdtrain.plugins.trial import predict
from hvdtrain.plugins.trial.keys import Placement
from hvdtrain.report.starts import ranks_text
from hvdtrain.settings import Settings
from hvdtrain.start_up.job import open_session
from hvdtrain.training.agreement import plan_together

SMALL = 4
"""Bytes of the tensor that measures latency."""

SECONDS = 10.0
"""The approximate duration of all measured steps."""

TURNS = 3
"""How many times each batch is trained on; the first time is a warm-up."""

FEWEST, MOST = 4, 32
"""The limits on the number of batches."""

SLOW = 0.05
"""The share of a step by which a rank has to be slower than the others to count as slow."""


def predict_speed(comm: Communicator, settings: Settings, placements: Sequence[Placement]) -> list[str]:
    """Collective. Train some steps with and without the other ranks, on models that are thrown away, and predict from that the
    speed of training on other numbers of ranks. Returns lines, the same on all ranks. Raises: HvdtrainError.
    """
    apart = SingleCommunicator(comm.local_rank, comm.local_size)
    with_gradients = replace(settings, reduce=replace(settings.reduce, reduce_type="grad"))
    with open_session(with_gradients, "measure", comm) as session, open_session(settings, "measure", apart) as alone:
        feed = replace(session.feeds[0], distribution="shard")  # the same batches on all ranks, so that they can be compared
        plan = plan_together(comm, feed, 1)
        costs = _costs(feed, plan)
        learners = [alone.learner] if comm.size == 1 else [alone.learner, session.learner]
        largest, _ = _read(feed, plan, [int(costs.argmax())])
        counts = [_count(warm_up(learner, largest[0]), len(learners), plan) for learner in learners]
        counts = comm.gather(counts, name="doctor.count")[0]
        chosen = spread(costs, max(counts))
        read, reading_seconds = _read(feed, plan, chosen)
        reading_seconds = statistics.fmean(comm.gather(reading_seconds, name="doctor.reading"))
        reading_per_frame = reading_seconds / max(1, int(costs[chosen].sum()))
        # With a slow network, a step with the other ranks takes much longer: fewer of them are measured.
        few = spread(costs[chosen], counts[-1])
        seconds = step_seconds(comm, learners, [read, [read[number] for number in few]][: len(learners)])
        measured = _computing(comm, settings, alone.learner, costs[chosen], seconds[0], reading_per_frame)
        if comm.size > 1:
            exchange = _exchange(comm, settings, alone.learner)
            travel = predict.gradient_exchange_seconds(measured, exchange, comm.size)
            waited = _waiting_share(seconds[0][..., few], seconds[1], travel)
            measured = replace(measured, exchange=replace(exchange, waited=waited))

        def prediction_lines() -> list[str]:
            work = {1: _work(settings, feed, plan, 1)}
            impossible = []
            for ranks in dict.fromkeys(placement.ranks for placement in placements):
                try:
                    work[ranks] = _work(settings, feed, plan, ranks)
                except DataError as error:
                    impossible.append(f"{ranks} ranks: not predicted, as such a training would end with: {error}")
            possible = [placement for placement in placements if placement.ranks in work]
            return lines(measured, predict.predict(measured, work, possible)) + impossible

        return on_rank_zero(comm, prediction_lines, name="doctor.predicted")


def _computing(
    comm: Communicator, settings: Settings, learner: Learner, costs: Array, seconds: Array, reading_per_frame: float
) -> predict.Measurement:
    """Collective. Everything but the exchange."""
    fixed, per_frame, jitter, slow_rank = fit(costs, seconds)
    fixed_threads = this_process.environment().get("OMP_NUM_THREADS", "")
    return predict.Measurement(
        size=comm.size,
        per_host=comm.local_size,
        hosts=len(set(comm.gather(socket.gethostname(), name="doctor.hosts"))),
        cores=this_process.cores() * (comm.local_size if this_process.is_bound() else 1),
        threads=settings.run.num_threads or (int(fixed_threads) if fixed_threads.isdigit() else None),
        on_cpu=learner.meter.peak_memory() is None,
        fixed=fixed,
        per_frame=per_frame,
        jitter=jitter,
        slow_rank=slow_rank,
        reading_per_frame=reading_per_frame,
        parameters=sum(map(FRAMEWORKS[settings.run.backend].tensors.size, parameters_of(learner))),
        steps_per_update=steps_per_update(settings.accumulation)(1, 0.0, 0),
        exchange=None,
    )


def _exchange(comm: Communicator, settings: Settings, learner: Learner) -> predict.Exchange:
    """Collective. The all-reduces, with nothing else going on."""
    tensors = FRAMEWORKS[settings.run.backend].tensors
    parameters = parameters_of(learner)
    bucket_bytes = comm.bucket_bytes(learner.meter.peak_memory() is not None)
    few, bucket = (tensors.zeros(size // 4, comm.local_rank) for size in (SMALL, bucket_bytes))
    return predict.Exchange(
        latency=all_reduce_seconds(comm, tensors, lambda: [few], "doctor.small"),
        bucket_bytes=bucket_bytes,
        bucket_seconds=all_reduce_seconds(comm, tensors, lambda: [bucket], "doctor.bucket"),
        parameters_seconds=all_reduce_seconds(comm, tensors, lambda: [value * 1 for value in parameters], "doctor.parameters"),
        waited=1.0,
    )


def _costs(feed: Feed, plan: Plan) -> Array:
    """The padded frames of every batch, summed over data keys; shape (batches,)."""
    return numpy.asarray(numpy.sum(list(plan.padded(feed.lengths_in(1)).values()), axis=0))


def _work(settings: Settings, feed: Feed, plan: Plan, ranks: int) -> predict.Work:
    """The first epoch on a number of ranks. Raises: DataError, if there are more of them than sequences in a batch of all."""
    keys = settings.batch
    if keys.batch_size_total is not None or keys.max_seqs_total is not None:
        plan = replace(feed, batch_keys=keys.per_rank(ranks).training_keys()).plan(1)
    return predict.Work(_costs(feed, plan), feed.sequences_among(plan.order))


def spread(costs: Array, count: int) -> list[int]:
    """The numbers of `count` batches, evenly spaced from the smallest to the largest; of all, if there are fewer.

    >>> spread(numpy.array([5, 1, 3, 2]), 2), spread(numpy.array([2, 1]), 9)
    ([3, 0], [1, 0])
    """
    count = min(count, len(costs))
    by_cost = numpy.argsort(costs, kind="stable")
    return [int(by_cost[int((number + 0.5) * len(by_cost) / count)]) for number in range(count)]


def _read(feed: Feed, plan: Plan, numbers: Sequence[int]) -> tuple[list[Batch], float]:
    """Some batches of a plan, and the seconds it took to read them."""
    began = time.perf_counter()
    with feed.read([plan.batch(number) for number in numbers], epoch=1) as batches:
        return list(batches), time.perf_counter() - began


def _count(step: float, learners: int, plan: Plan) -> int:
    """The number of batches to measure with each of some learners, if one step takes so many seconds."""
    return min(MOST, max(FEWEST, int(SECONDS / (TURNS * learners * max(step, 1e-4)))), plan.num_batches)


def warm_up(learner: Learner, batch: Batch) -> float:
    """Train two steps, to allocate memory and choose kernels; return the seconds of the second."""
    learner.begin_epoch(1, 0)
    _step(learner, batch)
    return _step(learner, batch)


def _step(learner: Learner, batch: Batch) -> float:
    """The seconds of a step that changes nothing. Waits for a GPU."""
    learner.meter.take_step_seconds()
    learner.backward(batch)
    learner.update(0.0)
    return learner.meter.take_step_seconds()


def step_seconds(comm: Communicator, learners: Sequence[Learner], batches: Sequence[Sequence[Batch]]) -> list[Array]:
    """Collective. For each learner, the seconds of steps on its batches; shape (ranks, turns, batches). The learners alternate,
    so that other programs disturb all of them. All ranks compute at the same time, as they do in a training."""
    seconds_by_turn: list[list[list[float]]] = [[] for _ in learners]
    for turn in range(TURNS):
        for learner, batches_here, turns in zip(learners, batches, seconds_by_turn, strict=True):
            comm.gather(None, name="doctor.begin")
            seconds = [0.0] * len(batches_here)
            for number in numpy.random.RandomState(turn).permutation(len(batches_here)).tolist():
                seconds[number] = _step(learner, batches_here[number])
            turns.append(seconds)
    return [numpy.array(comm.gather(turns[1:], name="doctor.step_seconds")) for turns in seconds_by_turn]


def fit(costs: Array, seconds: Array) -> tuple[float, float, tuple[float, ...], float]:
    """Fit the time of a step: its fixed seconds, the seconds for each padded frame, the remaining variation, and the seconds by
    which every step of the slowest rank is longer, if that is significant.

    Args:
        costs: padded frames of batches; shape (batches,).
        seconds: of steps; shape (ranks, turns, batches).
    """
    frames = numpy.broadcast_to(costs, seconds.shape).ravel().astype(float)
    flat = seconds.ravel()
    spread = float(frames.var())
    per_frame = max(0.0, float(((frames - frames.mean()) * (flat - flat.mean())).mean()) / spread) if spread else 0.0
    fixed = float(flat.mean()) - per_frame * float(frames.mean())
    if fixed < 0:
        fixed, per_frame = 0.0, float(flat.mean() / frames.mean())
    residuals = seconds - (fixed + per_frame * costs)
    means = residuals.mean(axis=(1, 2))
    jitter = residuals - means[:, None, None]
    excess = float(means.max() - numpy.median(means)) if len(means) > 2 else float(means.max() - means.min())
    noise = 3 * float(jitter.std()) * (2 / jitter[0].size) ** 0.5
    slow_rank = excess if excess > max(noise, SLOW * float(flat.mean())) else 0.0
    if slow_rank:  # then fit the other ranks
        fixed = max(0.0, fixed + float(numpy.delete(means, means.argmax()).mean()))
    return fixed, per_frame, tuple(jitter.ravel().tolist()), slow_rank


def _waiting_share(alone: Array, together: Array, travel: float) -> float:
    """How much longer steps take with the exchange of gradients, as a share of the time that it takes by itself.

    Args:
        alone, together: seconds of the same steps without and with exchange; shape (ranks, turns, batches).
        travel: seconds of the exchange.
    """
    return max(0.0, float(numpy.median(together.mean(axis=0) - alone.max(axis=0))) / max(travel, 1e-9))


def lines(measured: predict.Measurement, predictions: Sequence[predict.Prediction]) -> list[str]:
    """The measurement, a table of the predictions, and conclusions from it."""
    names = f"{'sequences/s':>11} {'speed-up':>8} {'step':>9} {'stragglers':>10} {'network':>8}"
    table = [f"{'ranks':>8}  {'method':<14} {names}  limited by"]
    for row in predictions:
        mark = "*" if row.placement.ranks > measured.size else " "
        network = "unknown" if row.network is None else f"{row.network / row.seconds:.0%}"
        table.append(
            f"{row.placement!s:>7}{mark}  {row.method!s:<14} {row.rate:>11.4g} {row.speed_up:>8.3g} {1e3 * row.seconds:>6.4g} ms "
            f"{row.stragglers:>10.0%} {network:>8}  {row.limit}"
        )
    lines = _measured_lines(measured) + (table if predictions else [])
    for placement in dict.fromkeys(row.placement for row in predictions):
        chosen = predict.best([row for row in predictions if row.placement == placement])
        if placement.ranks > 1:
            speed = f"{chosen.speed_up:.3g} times the speed of one rank"
            lines.append(f"{placement} ranks: {chosen.method} is as fast as any: {speed}, limited by {chosen.limit}")
    return lines + _notes(measured, predictions)


def _measured_lines(measured: predict.Measurement) -> list[str]:
    hosts = f"{measured.hosts} host{'s' if measured.hosts > 1 else ''} of {measured.cores} cores"
    slow = f", every one {1e3 * measured.slow_rank:.3g} ms longer on the slowest rank" if measured.slow_rank else ""
    text = [
        f"measured on {ranks_text(measured.size)} on {hosts}: a step computes "
        f"{1e3 * measured.fixed:.3g} ms and {1e6 * measured.per_frame:.3g} us for each padded frame, "
        f"with {1e3 * statistics.pstdev(measured.jitter or [0.0]):.3g} ms of variation{slow}; "
        f"reading takes {1e6 * measured.reading_per_frame:.2g} us for each"
    ]
    if (exchange := measured.exchange) is not None:
        alone = predict.gradient_exchange_seconds(measured, exchange, measured.size)
        text.append(
            f"all-reduce: {1e6 * exchange.latency:.0f} us for a few bytes, {1e3 * exchange.bucket_seconds:.3g} ms for "
            f"{size_text(exchange.bucket_bytes)}; {size_text(measured.parameters)} of gradients travel in {1e3 * alone:.3g} ms "
            f"and make a step {1e3 * exchange.waited * alone:.3g} ms longer; all parameters at once take "
            f"{1e3 * exchange.parameters_seconds:.3g} ms"
        )
    return text


METHOD_NOTES = (
    f"as fast as any: trains at least {predict.NEARLY_AS_FAST:.0%} of the sequences per second of the fastest method; of several "
    "such methods, the one that exchanges most often",
    "grad: the ranks average gradients in every update, so they train as one rank does with the batches of all",
    "param, H = 16: each rank updates its model by itself, and the ranks average their parameters after every 16 updates "
    "(horovod_reduce_type = 'param', horovod_param_sync_step = 16); this trains differently from grad, and only a training shows "
    "whether the losses are as good",
)
"""What the names of the methods mean, and what is compared."""


def _notes(measured: predict.Measurement, predictions: Sequence[predict.Prediction]) -> list[str]:
    notes = list(METHOD_NOTES) if any(prediction.placement.ranks > 1 for prediction in predictions) else []
    placements = [prediction.placement for prediction in predictions]
    if any(placement.ranks > measured.size for placement in placements):
        notes.append(f"* extrapolated from {ranks_text(measured.size)}, by the formulas in docs/performance.md")
    several = any(placement.ranks > (placement.per_host or measured.per_host) for placement in placements)
    if measured.exchange is None:
        if any(placement.ranks > 1 for placement in placements):
            notes.append(
                "the network was not measured, as there is one rank: no speed-up will be larger than these (mpirun -np 2)"
            )
    elif several and measured.hosts == 1:
        notes.append("all measured ranks are on one host: between hosts, the network will be slower than this")
    per_host = [placement.per_host or measured.per_host for placement in placements]
    if measured.on_cpu and any(predict.slowdown(measured, ranks) > 1 for ranks in per_host):
        notes.append(
            f"ranks that have a smaller share of a host's {measured.cores} cores than these compute that much more slowly"
        )
    return notes


def parameters_of(learner: Learner) -> list[Tensor]:
    """The trained parameters (not copies)."""
    return list(learner.state.tensors("parameters").values())


def all_reduce_seconds(
    comm: Communicator, tensors: ModuleType, make: Callable[[], list[Any]], name: str, length: float = 1.0
) -> float:
    """Collective. The median over some all-reduces of the slowest rank's seconds.

    Args:
        length: the approximate seconds of all of them.
    """

    def once() -> float:
        sent = make()
        started = time.perf_counter()
        tensors.wait_for(all_reduce(comm, sent, "sum", name=name)[-1])
        return time.perf_counter() - started

    once()
    first = once()
    times = comm.gather(min(200, max(5, int(length / 2 / max(first, 1e-5)))), name=f"{name}.times")[0]
    seconds = [once() for _ in range(times)]
    return max(comm.gather(statistics.median(seconds), name=f"{name}.seconds"))
