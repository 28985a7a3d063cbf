"""Numbers within an epoch: the records of steps, and the receivers of rank 0's reports."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import prunes
from hvdtrain.learner.meter import Meter
from hvdtrain.report.epoch import EpochReport, EvaluationReceiver, Reporter


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


def peak_memory(meter: Meter) -> int:
    """The largest number of bytes of memory used so far: of the GPU; on a CPU, of the host (RSS)."""
    of_device = meter.peak_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if of_device is None else of_device  # in KB on Linux
