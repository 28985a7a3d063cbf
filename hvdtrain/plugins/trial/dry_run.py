"""The dry run: trains on a few batches, without writing anything, to estimate the time and memory of an epoch."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.checkpoint.saver_base import SaverBase
from hvdtrain.comm.base import Communicator, together
from hvdtrain.data.feed import Feed
from hvdtrain.data.files import size_text
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Array
from hvdtrain.engine import Engine
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.trial.keys import TrialKeys, parse_placements
from hvdtrain.plugins.trial.scaling import predict_speed, spread
from hvdtrain.report.starts import ranks_text
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime import log
from hvdtrain.runtime.log import silence
from hvdtrain.runtime.scores import name_scores
from hvdtrain.runtime.timer import duration_text
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import unclear_line, with_totals
from hvdtrain.settings import Settings
from hvdtrain.start_up.announce import announce, gather_hosts
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.limits import open_limits, open_rates
from hvdtrain.start_up.measures import wrong_scores
from hvdtrain.start_up.ranks import open_communicator
from hvdtrain.start_up.without_files import writing_nothing
from hvdtrain.training.agreement import plan_together
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.limits import TrainingLimits
from hvdtrain.training.session import Session
from hvdtrain.training.step_log import StepLog

SECONDS = 10.0
"""The rough duration of all measured steps of a training or an evaluation."""

FEWEST, MOST = 4, 50
"""The limits of the number of measured steps."""


@dataclass(frozen=True)
class PhaseEstimate:
    """The estimate for the training of an epoch, or for an evaluation.

    Attributes:
        tried: descriptions of the largest batches, which were run first, without being measured.
        steps: the number of steps in the epoch.
        measured: the number of steps that were measured.
        computing_seconds: estimated for all steps.
        reading_seconds: estimated for reading all batches, which happens in the background.
        padding: by data key, as a share of the padded frames.
    """

    name: str
    tried: list[str]
    steps: int
    measured: int
    computing_seconds: float
    reading_seconds: float
    padding: dict[str, float]

    @property
    def seconds(self) -> float:
        """Computing and reading overlap, so the slower one counts."""
        return max(self.computing_seconds, self.reading_seconds)


def dry_run(settings: Settings) -> None:
    """Start a training on all ranks, run some steps, and estimate the time and memory of an epoch. Raises: HvdtrainError.

    If `predict_ranks` is set, also predict the speed on other numbers of ranks.
    """
    settings = writing_nothing(settings)
    with open_communicator(settings) as comm:
        if _estimate(settings, comm) and settings.of(TrialKeys).predict_ranks is not None:
            for line in predict_speed(comm, settings, parse_placements(settings.of(TrialKeys).predict_ranks)):
                log.result(f"predict: {line}")


def _estimate(settings: Settings, comm: Communicator) -> bool:
    """Collective. Log the estimates; return False if there is nothing left to train."""
    with open_session(settings, "dry_run", comm) as session:
        limits = open_limits(settings, session.epochs)
        announce(settings, session, limits, gather_hosts(session))
        together(comm, lambda: _check_targets(settings), name="check_targets")
        if limits.are_reached(session.progress):
            return False
        epoch = session.progress.epoch + 1
        train, *evaluations = session.epochs.feeds(session.feeds, epoch)
        with silence():  # the scores and slow ranks of these few steps mean nothing
            tried = EpochRecord(epoch, 0.0)
            evaluated = dict[str, float]()
            phases = [_measure_phase(session, train, epoch, trainer(settings, session, limits, tried), closing=1)]
            phases += [_measure_phase(session, feed, epoch, _evaluator(session, epoch, evaluated)) for feed in evaluations]
            tried.scores.update(with_totals(evaluated, tried.losses))
        for line in [*_time_lines(phases, comm.size, limits.num_epochs - epoch + 1), *_memory_lines(session)]:
            log.result(line)
        history = [*session.progress.history, tried]
        log.info(f"the best epoch will be that of {settings.measure.describe(history)}")
        mistake = wrong_scores(settings, history, is_saved=False)
        if mistake is not None:
            raise mistake
        if (unclear := unclear_line(history, settings.measure)) is not None:
            log.warning(unclear)
    return True


def _check_targets(settings: Settings) -> None:
    """Check that a training would be able to write its files. Raises: ConfigError."""
    folder = Path(settings.run.model).absolute().parent
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError.of("not-writable", f"model: expected a folder that can be written to, got {folder}")


Run = Callable[[Feed], float]
"""Processes the batches that a feed selects; returns the seconds that this took."""


def trainer(settings: Settings, session: Session, limits: TrainingLimits, record: EpochRecord) -> Run:
    """Trains with the engine. Measures all of a step except waiting for data, and excludes the last step.

    Args:
        record: receives the scores and losses.
    """
    progress = session.progress
    one_epoch = replace(limits, num_epochs=progress.epoch + 1, save_steps=None, save_minutes=None)

    def run(feed: Feed) -> float:
        step_starts: list[float] = []

        def note(epoch: int, step: int, indices: Array) -> None:
            session.learner.meter.take_step_seconds()  # waits for a GPU
            step_starts.append(time.perf_counter() - session.timer.seconds.get("data wait", 0.0))

        fresh = Progress(progress.step, progress.epoch, list(progress.history))
        tried = replace(session, feeds=[feed], saver=SaverBase(), progress=fresh)
        Engine(tried, open_rates(settings, session.comm.size, session.epochs), one_epoch, Reporters(), StepLog(), [note]).run()
        record.scores.update(fresh.history[-1].scores)
        record.losses.update(fresh.history[-1].losses)
        return step_starts[-1] - step_starts[0] if step_starts else 0.0

    return run


def _evaluator(session: Session, epoch: int, scores: dict[str, float]) -> Run:
    def run(feed: Feed) -> float:
        began = time.perf_counter()
        with session.learner.state.averaged_weights():
            means = evaluate(session.comm, session.learner, session.watchdog, feed, epoch, step_log=StepLog())
        scores.update(name_scores(feed.name, means))
        return time.perf_counter() - began

    return run


def _measure_phase(session: Session, feed: Feed, epoch: int, run: Run, closing: int = 0) -> PhaseEstimate:
    """Collective. The estimate for a phase. The largest batches run first: what does not fit into memory fails immediately, and
    later steps are measured after all warm-up.

    Args:
        closing: the number of rounds to run after the measured ones, since a training step ends when the next one begins.
    """
    comm = session.comm
    size = comm.size if feed.distribution == "shard" else 1
    session.watchdog.beat(f"planning {feed.name}")
    plan = plan_together(comm, feed, epoch)
    rounds = Rounds(plan, feed.lengths_in(epoch), size)
    if not len(rounds):
        return PhaseEstimate(feed.name, [], 0, 0, 0.0, 0.0, {})

    def select(chosen: Sequence[int]) -> Feed:
        return replace(feed, only=rounds.only([*chosen, *chosen[:closing]]))

    def maximum(seconds: float) -> float:
        return max(comm.gather(seconds, name="slowest"))

    largest = rounds.largest()
    run(select(largest))
    typical = maximum(run(select(largest[:1]))) * float(rounds.costs.mean() / rounds.costs[largest[0]])
    chosen = rounds.spread(min(MOST, max(FEWEST, int(SECONDS / max(typical, 1e-6)))))
    session.watchdog.beat(f"reading {feed.name}")
    began = time.perf_counter()
    sample = select(chosen)
    with sample.read(sample.rank_batches(sample.plan(epoch)), epoch, session.learner.staging) as batches:
        count = sum(1 for _ in batches)
    reading_seconds = (time.perf_counter() - began) * len(chosen) / max(count, 1)
    computing_seconds = maximum(run(sample))
    run(select(largest))  # once more, since memory is fragmented by now
    scale = float(rounds.costs.sum() / rounds.costs[chosen].sum())
    return PhaseEstimate(
        name=feed.name,
        tried=[rounds.describe(number) for number in largest],
        steps=len(rounds),
        measured=len(chosen),
        computing_seconds=scale * computing_seconds,
        reading_seconds=scale * maximum(reading_seconds),
        padding=feed.padding(plan, epoch),
    )


def _time_lines(phases: list[PhaseEstimate], ranks: int, epochs: int) -> list[str]:
    """Lines about the steps that were run, and the estimates for an epoch and for the remaining `epochs`."""
    train = phases[0]
    kinds = ("largest batch", "batch with the longest sequence")
    lines = [f"dry run: {kind}: {description}" for kind, description in zip(kinds, train.tried, strict=False)]
    lines.append(f"dry run: {train.measured} more steps, from small batches to large ones, were measured; nothing was written")
    for phase in phases:
        computing, reading = (seconds / max(1, phase.steps) for seconds in (phase.computing_seconds, phase.reading_seconds))
        slow = f", held up by reading, {reading:.3g} s each" if reading > computing else ""
        steps = f"{phase.steps} step{'s' if phase.steps != 1 else ''} of {computing:.3g} s{slow}"
        lines.append(f"estimate: {phase.name}: {duration_text(phase.seconds)} ({steps})")
    epoch = sum(phase.seconds for phase in phases)
    more = f"; {epochs} epochs: {duration_text(epochs * epoch)}" if epochs > 1 else ""
    lines.append(f"estimate: an epoch on {ranks_text(ranks)}: {duration_text(epoch)}, without saving{more}")
    return [*lines, "estimate: padding: " + ", ".join(f"{name} {share:.1%}" for name, share in train.padding.items())]


def _memory_lines(session: Session) -> list[str]:
    """Collective. Lines about the memory that the ranks needed, and the size of a checkpoint."""
    comm = session.comm
    learner = session.learner
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KB on Linux
    peaks = comm.gather((host, learner.meter.peak_memory()), name="peak_memory")
    lines = [f"estimate: memory: {_largest([host for host, _ in peaks])}"]
    devices = [device for _, device in peaks if device is not None]
    lines += [f"estimate: memory of the GPU: {_largest(devices)}"] if devices else []
    learner.state.gather_state()
    if comm.rank == 0:
        contents = learner.state.contents({})
        sizes = {"model": num_bytes(contents.model), "optimizer": num_bytes(contents.optimizer)}
        if contents.running is not None:
            sizes["running average"] = sum(
                learner.state.wide(tensor).nbytes for tensor in learner.state.tensors("parameters").values()
            )
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items())
        lines.append(f"estimate: checkpoint: {size_text(sum(sizes.values()))}: {parts}")
    return lines


def _largest(sizes: list[int]) -> str:
    largest = max(sizes)
    return size_text(largest) + (f" at most, on rank {sizes.index(largest)}" if len(sizes) > 1 else "")


def num_bytes(state: Any) -> int:
    """The bytes of all arrays and tensors in dicts, lists and tuples.

    >>> import numpy
    >>> num_bytes({"a": numpy.zeros((2, 3), "float32"), "b": [(numpy.zeros(1), 7)]})
    32
    """
    if isinstance(state, dict):
        return sum(map(num_bytes, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(num_bytes, state))
    return int(getattr(state, "nbytes", 0))


@dataclass(frozen=True)
class Rounds:
    """The rounds of an epoch. In each round, every rank takes a batch; the last one may be incomplete.

    Attributes:
        lengths: by data key, the frames of the sequences or chunks that the plan's indices refer to.
        size: the number of the plan's batches in a round.
    """

    plan: Plan
    lengths: Mapping[str, Array]
    size: int

    def __len__(self) -> int:
        return -(-self.plan.num_batches // self.size)

    @cached_property
    def costs(self) -> Array:
        """The padded frames of the largest batch of every round, summed over data keys; shape (rounds,)."""
        return self._by_round(self.plan.padded(self.lengths))

    def largest(self) -> list[int]:
        """The round with the batch of most padded frames, and the one with the longest sequence, if that is another one."""
        longest = self._by_round(self.plan.longest(self.lengths))
        return list(dict.fromkeys(int(column[: self._num_full].argmax()) for column in (self.costs, longest)))

    def spread(self, count: int) -> list[int]:
        """Rounds at equal distances in the order of their size."""
        return spread(self.costs[: self._num_full], count)

    def only(self, rounds: Sequence[int]) -> Plan:
        """A plan of only these rounds, in this order."""
        batches = [batch for number in rounds for batch in range(number * self.size, (number + 1) * self.size)]
        existing = numpy.array([batch for batch in batches if batch < self.plan.num_batches], dtype=numpy.int64)
        return self.plan.with_batches(existing)

    def describe(self, number: int) -> str:
        """The largest batch of a round, in words."""
        frames = self.plan.padded(self.lengths)
        batches = numpy.arange(number * self.size, min((number + 1) * self.size, self.plan.num_batches))
        batch = batches[numpy.sum(list(frames.values()), axis=0)[batches].argmax()]
        padded = ", ".join(f"{column[batch]} of {name}" for name, column in frames.items())
        return f"{len(self.plan.batch(batch))} sequences, padded frames: {padded}"

    @property
    def _num_full(self) -> int:
        """The number of rounds in which every rank has a batch, but at least 1."""
        return max(self.plan.num_batches // self.size, 1)

    def _by_round(self, columns: Mapping[str, Array]) -> Array:
        """The largest sum over data keys of a batch, by round."""
        of_batches = numpy.sum(list(columns.values()), axis=0)
        missing = len(self) * self.size - len(of_batches)
        by_round: Array = numpy.pad(of_batches, (0, missing)).reshape(len(self), self.size)
        return numpy.asarray(by_round.max(axis=1))
