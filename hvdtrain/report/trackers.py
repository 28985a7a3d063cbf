"""Reports to experiment trackers: a function in the config for any service, and event files for TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

from hvdtrain.config.keys import ALONE, Section, Sections, key
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError
from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.steps import StepRecord, step_metrics


@dataclass(frozen=True, kw_only=True)
class TrackerKeys(Section):
    """Experiment trackers, beside the log and scores.jsonl."""

    use_tensorboard: bool = key(False, "write scores, learning rate and times for TensorBoard into tensorboard/ beside the model")
    tensorboard_histograms: bool = key(False, "also write a histogram of every parameter for TensorBoard (with use_tensorboard)")
    track_epoch: Callable[..., None] | str | None = key(
        None,
        "function (*, epoch, step, metrics, **_) that rank 0 calls after every epoch with metrics {name: number}, to log "
        "them to MLflow, Weights & Biases or similar services",
    )

    def problems(self, others: Sections = ALONE) -> list[str]:
        if self.tensorboard_histograms and not self.use_tensorboard:
            return ["tensorboard_histograms: expected use_tensorboard = True beside it, got False"]
        return []


def metrics(report: EpochReport) -> dict[str, float]:
    """All numbers of a report, by names with a group: `dev/ce`, `time/compute`, `padding/data`.

    Seconds are averaged over the ranks; shares refer to the summed time of all ranks.
    """
    numbers = {name.replace("_loss_", "/", 1): value for name, value in report.scores.items()}
    numbers |= {"learning_rate": report.learning_rate, "time/elapsed": report.elapsed, "time/computing_share": report.computing}
    if report.loss_scale is not None:
        numbers["loss_scale"] = report.loss_scale
    if report.sent:
        numbers |= {"exchange/bytes": report.sent, "exchange/syncs": report.syncs}
    names = dict.fromkeys(name for rank in report.seconds for name in rank)
    whole = sum(sum(rank.values()) for rank in report.seconds)
    for name in names:
        values = [rank.get(name, 0.0) for rank in report.seconds]
        numbers[f"time/{name}"] = fmean(values)
        numbers[f"time share/{name}"] = sum(values) / whole if whole else 0.0
        if len(values) > 1:
            numbers[f"time of the slowest rank/{name}"] = max(values)
    return numbers | {f"padding/{name}": share for name, share in report.padding.items()}


class Tracker:
    """Calls the config's `track_epoch` with the metrics of every epoch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def epoch(self, report: EpochReport) -> None:
        numbers: Mapping[str, float] = metrics(report)
        self._function(epoch=report.epoch, step=report.global_step, metrics=numbers)


class TensorBoard:
    """Writes an event file for TensorBoard, which hides what an earlier run wrote beyond the step where this one starts.

    The records use TensorBoard's own messages, but not its `SummaryWriter`, which imports TensorFlow if that is installed.

    Args:
        folder: where the event file is written.
        step: steps done before this run.
        parameters: called after every epoch; returns (name, array) pairs to write histograms of. None: no histograms.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, step: int, parameters: Callable[[], Iterable[tuple[str, Array]]] | None = None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ConfigError([f"use_tensorboard: expected TensorBoard, got: {error} (pip install tensorboard)"]) from None
        self._folder = folder
        self._event, self._summary, self._histogram, self._writer = Event, Summary, HistogramProto, RecordWriter
        self._parameters = parameters
        self._begin = [
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)),
        ]
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._path = folder / name

    def epoch(self, report: EpochReport) -> None:
        numbers = metrics(report)
        for rank, seconds in enumerate(report.seconds):
            numbers |= {f"time of rank {rank}/{name}": value for name, value in seconds.items()}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        for name, array in self._parameters() if self._parameters is not None else ():
            if (found := histogram(array)) is not None:
                values.append(self._summary.Value(tag=f"parameters/{name}", histo=self._histogram(**found)))
        self._write(report.global_step, values)

    def step(self, record: StepRecord) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in step_metrics(record).items()]
        self._write(record.global_step, values)

    def _write(self, step: int, values: Sequence[Any]) -> None:
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            writer = self._writer(file)
            for one in [*self._begin, event]:
                writer.write(one.SerializeToString())
        self._begin = []


BINS = 64
"""Bins of a histogram."""


def histogram(values: Array) -> dict[str, Any] | None:
    """The fields of TensorBoard's HistogramProto for the finite elements of an array; None if there are none.

    >>> found = histogram(numpy.array([[0.0, 1.0], [4.0, numpy.nan]]))
    >>> found["num"], found["min"], found["max"], found["sum"], found["sum_squares"]
    (3, 0.0, 4.0, 5.0, 17.0)
    """
    flat = numpy.asarray(values, dtype=numpy.float64).reshape(-1)
    flat = flat[numpy.isfinite(flat)]
    if not len(flat):
        return None
    counts, edges = numpy.histogram(flat, BINS)
    return {
        "min": float(flat.min()),
        "max": float(flat.max()),
        "num": len(flat),
        "sum": float(flat.sum()),
        "sum_squares": float(numpy.square(flat).sum()),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.tolist(),
    }
