"""Numbers within an epoch: the records that rank 0 makes of some steps, and their receivers."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Array
from hvdtrain.errors import prunes
from hvdtrain.learner.meter import Meter
from hvdtrain.report.epoch import EpochReport, EvaluationReceiver, Reporter
from hvdtrain.runtime import log
from hvdtrain.runtime.timer import Timer


@dataclass(frozen=True)
class StepRecord:
    """The numbers of a training at one of its steps. Shares and rates refer to the time since the last record.

    Attributes:
        step: completed steps of the epoch.
        global_step: completed steps of the whole training; steps.jsonl does not have it.
        progress: the share of the epoch that is done, from 0 to 1.
        elapsed: seconds since the epoch began, without those between a stop and a resume.
        learning_rate: of the last update; before the first one, of the next.
        scores: means by name over rank 0's batches since the last record; on a GPU, over those whose losses have arrived.
        gradient_norm: the global norm before clipping, of the last update for which it has arrived; of the reduced gradients, or
            of rank 0's if ranks update independently. None without `gradient_clip_global_norm`, which computes it.
        sequences_per_second, frames_per_second: of all ranks, the latter by data key without padding; those of rank 0 where
            every rank goes through all data in its own order. Of chunks, sequences are counted where their first one is.
        memory: the largest number of bytes so far that rank 0 used of its GPU's memory; on a CPU, of the host's (RSS).
        computing: the share of the time that rank 0 spent in training steps, collectives included, from 0 to 1.
        data_wait: the share of the time that rank 0 waited for data, from 0 to 1.
    """

    epoch: int
    step: int
    global_step: int
    progress: float
    elapsed: float
    learning_rate: float
    scores: Mapping[str, float]
    gradient_norm: float | None
    sequences_per_second: float
    frames_per_second: Mapping[str, float]
    memory: int | None
    computing: float
    data_wait: float


StepReceiver = Callable[[StepRecord], None]
"""Receives every record on rank 0, between two steps, so it has to be fast. If it raises an exception, training continues."""


@dataclass(frozen=True)
class Reporters:
    """The receivers of rank 0's reports; none on the other ranks.

    Attributes:
        epochs: called with the report of every finished epoch.
        evaluations: called with the report of every evaluation within an epoch.
        steps: called with the record of a step whenever the log has a line about it.
        services: as `epochs`, and called after them; they may take as long as they need, for which all ranks wait.
    """

    epochs: Sequence[Reporter] = ()
    steps: Sequence[StepReceiver] = ()
    services: Sequence[Reporter] = ()
    evaluations: Sequence[EvaluationReceiver] = ()

    def with_others(self, more_reporters: Iterable[Reporters]) -> Reporters:
        """These reporters, and others after them."""
        every = [self, *more_reporters]
        return Reporters(
            [reporter for each in every for reporter in each.epochs],
            [receiver for each in every for receiver in each.steps],
            [service for each in every for service in each.services],
            [receiver for each in every for receiver in each.evaluations],
        )

    def epoch(self, report: EpochReport) -> None:
        """Pass the report of a finished epoch on to those that need no time for it."""
        for reporter in self.epochs:
            reporter.epoch(report)

    def serve(self, report: EpochReport) -> Exception | None:
        """Pass it on to the services. Returns what one of them raised to end an Optuna trial as pruned."""
        pruned = None
        for service in self.services:
            try:
                service.epoch(report)
            except Exception as error:
                if not prunes(error):
                    raise
                pruned = error
        return pruned


WorkCounter = Callable[[int, int], tuple[int, Mapping[str, int]]]
"""Counts the sequences in the batches between two positions of an epoch's plan, and their frames by data key."""


def work_counter(
    plan: Plan, lengths: Mapping[str, Array], num_sequences: Callable[[Array], int] = len, passes: int = 1
) -> WorkCounter:
    """A function that counts the sequences and frames in some batches of a plan.

    Args:
        lengths: by data key, the frames of the sequences or chunks that the plan's indices refer to.
        num_sequences: counts the sequences among such indices.
        passes: how many ranks have about as many in their own plans.

    >>> import numpy
    >>> plan = Plan(numpy.array([2, 0, 1]), numpy.array([0, 1, 3]))
    >>> work_counter(plan, {"data": numpy.array([5, 6, 7])})(1, 9)
    (2, {'data': 11})
    """

    def work(start: int, end: int) -> tuple[int, Mapping[str, int]]:
        frames = {name: passes * plan.num_frames(column, start, end) for name, column in lengths.items()}
        return passes * num_sequences(plan.indices_between(start, end)), frames

    return work


class StepNumbers:
    """Makes records and passes them on, without waiting for a GPU or other ranks.

    Args:
        receivers: called with every record.
        timer: has the seconds that rank 0 waited for data and for averaging parameters.
        meter: of rank 0's learner.
    """

    def __init__(self, receivers: Sequence[StepReceiver], timer: Timer, meter: Meter) -> None:
        self._receivers = list(receivers)
        self._failed: set[int] = set()
        self._timer = timer
        self._meter = meter

    def begin(self, work: WorkCounter, position: int) -> None:
        """The training of an epoch begins or continues.

        Args:
            work: counts the content of its batches.
            position: the number of batches of its plan that are done.
        """
        self._work = work
        self._position = position
        self._since = time.perf_counter()
        self._seconds = self._seconds_so_far()

    def skip(self, seconds: float) -> None:
        """Leave some seconds out of the time since the last record."""
        self._since += seconds

    def step(
        self,
        *,
        epoch: int,
        step: int,
        global_step: int,
        position: int,
        progress: float,
        elapsed: float,
        learning_rate: float,
        scores: Mapping[str, float],
    ) -> StepRecord:
        """Record a step. The arguments are those of `StepRecord`, and the number of batches of the plan that are done."""
        now = time.perf_counter()
        seconds = self._seconds_so_far()
        passed = max(now - self._since, 1e-9)
        waited, computed = (min(max((new - old) / passed, 0.0), 1.0) for new, old in zip(seconds, self._seconds, strict=True))
        num_sequences, num_frames = self._work(self._position, position)
        self._since = now
        self._seconds = seconds
        self._position = position
        record = StepRecord(
            epoch=epoch,
            step=step,
            global_step=global_step,
            progress=progress,
            elapsed=elapsed,
            learning_rate=learning_rate,
            scores=scores,
            gradient_norm=self._meter.gradient_norm(),
            sequences_per_second=num_sequences / passed,
            frames_per_second={name: count / passed for name, count in num_frames.items()},
            memory=peak_memory(self._meter),
            computing=computed,
            data_wait=waited,
        )
        for number, receiver in enumerate(self._receivers):
            try:
                receiver(record)
            except Exception as error:  # an observer never ends a training
                if number not in self._failed:
                    self._failed.add(number)
                    log.warning(
                        f"the numbers of step {step} were not recorded, training continues: {type(error).__name__}: {error}"
                    )
        return record

    def _seconds_so_far(self) -> tuple[float, float]:
        """Seconds spent waiting for data, and computing as in the report of an epoch, since a fixed time."""
        seconds = self._timer.seconds
        return seconds.get("data wait", 0.0), self._meter.step_seconds() + seconds.get("parameter sync", 0.0)


def peak_memory(meter: Meter) -> int:
    """The largest number of bytes of memory used so far: of the GPU; on a CPU, of the host (RSS)."""
    of_device = meter.peak_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if of_device is None else of_device  # in KB on Linux
