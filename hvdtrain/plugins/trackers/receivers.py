"""Reports to experiment trackers: the config's objects and function for any service, and event files for TensorBoard."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

from hvdtrain.data.types import Array
from hvdtrain.disk.atomic import write_atomically
from hvdtrain.errors import ConfigError, prunes
from hvdtrain.plugins.trackers.services import ARTIFACTS, RunDescription
from hvdtrain.report.ends import Status
from hvdtrain.report.epoch import FEW_RANKS, EpochReport, EvaluationReport
from hvdtrain.report.steps import StepRecord
from hvdtrain.runtime import log


def step_metrics(record: StepRecord) -> dict[str, float]:
    """All numbers that a record has by name, with the group as prefix: `steps/train/ce`, `steps/learning_rate`."""
    numbers: dict[str, float | None] = {f"steps/train/{name}": value for name, value in record.scores.items()}
    for name in ("learning_rate", "gradient_norm", "sequences_per_second", "memory", "computing", "data_wait"):
        numbers[f"steps/{name}"] = getattr(record, name)
    numbers |= {f"steps/frames_per_second/{name}": value for name, value in record.frames_per_second.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def metrics(report: EpochReport) -> dict[str, float]:
    """All numbers of a report by name, with the group as prefix: `dev/ce`, `time/compute`, `padding/data`.

    Seconds are averaged over the ranks; shares refer to the summed time of all ranks.
    """
    numbers = evaluation_metrics(report)
    numbers |= {"learning_rate": report.learning_rate, "time/elapsed": report.elapsed, "time/computing_share": report.computing}
    if report.loss_scale is not None:
        numbers["loss_scale"] = report.loss_scale
    if report.sent:
        numbers |= {"exchange/bytes": report.sent, "exchange/syncs": report.syncs}
    if report.sent_between_groups:
        numbers["exchange/bytes between groups"] = report.sent_between_groups
    names = dict.fromkeys(name for rank in report.seconds for name in rank)
    whole = sum(sum(rank.values()) for rank in report.seconds)
    for name in names:
        values = [rank.get(name, 0.0) for rank in report.seconds]
        numbers[f"time/{name}"] = fmean(values)
        numbers[f"time share/{name}"] = sum(values) / whole if whole else 0.0
        if len(values) > 1:
            numbers[f"time of the slowest rank/{name}"] = max(values)
    return numbers | {f"padding/{name}": share for name, share in report.padding.items()}


def evaluation_metrics(report: EpochReport | EvaluationReport) -> dict[str, float]:
    """The scores of an evaluation within an epoch, under the same names as those of epochs: `dev/ce`."""
    return {name.replace("_loss_", "/", 1): value for name, value in report.scores.items()}


def call_with_metrics(function: Callable[..., Any], report: EpochReport) -> None:
    """Call the config's `track_epoch` with the metrics of an epoch."""
    function(epoch=report.epoch, step=report.global_step, metrics=metrics(report))


class BestEffortReporter:
    """Passes reports on to a function; logs its first failure, and raises nothing but what prunes a trial."""

    def __init__(self, name: str, receive: Callable[[EpochReport], object]) -> None:
        self._name = name
        self._receive = receive
        self._has_failed = False

    def epoch(self, report: EpochReport) -> None:
        try:
            self._receive(report)
        except Exception as error:
            if prunes(error):
                raise
            if not self._has_failed:
                log.warning(
                    f"{self._name} failed after epoch {report.epoch}, training continues: {type(error).__name__}: {error}"
                )
            self._has_failed = True


MAX_WAITING = 1000
"""If a service is this many calls behind, records within an epoch are dropped."""

PATIENCE: Mapping[Status, float] = {"finished": 60.0, "stopped": 20.0, "failed": 5.0}
"""How many seconds the end of a training waits for a service that is behind, by how the training ended."""


class BackgroundTracker:
    """Calls a tracker in a separate thread, one call after the other, so that a slow service does not slow down the training.

    The first call that fails is logged, and later calls are still made; if creating the tracker or `begin` fails, no more are.

    Args:
        label: its name in messages.
        make: creates the tracker; called in the thread as well.
        on_begin: called with the id that `begin` returned.

    Attributes:
        num_failures: the number of calls that failed.
    """

    def __init__(self, label: str, make: Callable[[], Any], on_begin: Callable[[str], None] = lambda _: None) -> None:
        self._label = label
        self._make = make
        self._on_begin = on_begin
        self._tracker: Any = None
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._is_disabled = False
        self.num_failures = 0
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {label}", daemon=True)

    def begin(self, run: RunDescription) -> None:
        """Start the thread, whose first call is `begin`."""
        self._calls.put(("begin", (run,)))
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread left
            self._note_failure("begin", error)

    def epoch(self, report: EpochReport) -> None:
        self._calls.put(("log_epoch", (report.epoch, report.global_step, metrics(report))))

    def step(self, record: StepRecord) -> None:
        if self._calls.qsize() >= MAX_WAITING:
            self._num_dropped += 1
        else:
            self._calls.put(("log_steps", (record.epoch, record.global_step, step_metrics(record))))

    def evaluation(self, report: EvaluationReport) -> None:
        self._calls.put(("log_steps", (report.epoch, report.global_step, evaluation_metrics(report))))

    def request_end(self, status: Status, files: Mapping[str, Path]) -> None:
        """Queue the last calls.

        Args:
            files: files to keep with the run, by name.
        """
        for name, file in files.items():
            self._calls.put(("artifact", (file, name)))
        self._calls.put(("end", (status,)))
        self._calls.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until all calls are made, for at most this many seconds, and log what was not done."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            log.warning(f"trackers: {self._label} is still busy and was abandoned; {self._calls.qsize()} calls were not made")
        if self.num_failures > 1:
            log.warning(f"trackers: {self.num_failures} calls of {self._label} failed")
        if self._num_dropped:
            log.warning(f"trackers: {self._label} was too slow; {self._num_dropped} records within epochs were dropped")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            name, arguments = call
            if self._is_disabled:
                continue
            try:
                if self._tracker is None:
                    self._tracker = self._make()
                method = getattr(self._tracker, name, None)
                result = None if method is None else method(*arguments)
                if name == "begin":
                    self._record_begin(result)
            except BaseException as error:  # even a SystemExit, which would end the thread silently
                self._note_failure(name, error)

    def _note_failure(self, name: str, error: BaseException) -> None:
        self._is_disabled = name == "begin"
        if not self.num_failures:
            without = " without it" if self._is_disabled else ""
            log.warning(f"trackers: {self._label} failed in {name}, training continues{without}: {_error_text(error)}")
        self.num_failures += 1

    def _record_begin(self, run_id: Any) -> None:
        if run_id is not None:
            try:
                self._on_begin(str(run_id))
            except OSError as error:
                log.warning(
                    f"trackers: {self._label}: the run's id was not stored, a resume will begin another run: {_error_text(error)}"
                )
        place = getattr(self._tracker, "place", None)
        log.info(f"trackers: {self._label}: {run_id if place is None else place}")


def _error_text(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


class RunIds:
    """The ids of the trackers' runs, in a file next to the model: a resumed training continues these runs."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "trackers.json"
        self._lock = threading.Lock()

    def read(self) -> dict[str, str]:
        """The ids by tracker; empty if none are known."""
        with suppress(OSError, ValueError):
            return dict(json.loads(self._path.read_text(encoding="utf-8")))
        return {}

    def store(self, label: str, run_id: str) -> None:
        """Store the id of a tracker's run. Called in the threads of the trackers."""
        with self._lock:
            write_atomically(self._path, json.dumps({**self.read(), label: run_id}, indent=1) + "\n")


def write_artifacts(folder: Path, status: Status) -> dict[str, Path]:
    """The files about a training that trackers keep, by name; what fails is logged.

    Args:
        folder: with the training's records.
        status: how the training ends, which is not recorded yet.
    """
    written: dict[str, Path] = {}
    for name in ARTIFACTS:
        try:
            path = ARTIFACTS[name](folder, status)
        except Exception as error:
            log.warning(f"trackers: no {name} was written: {_error_text(error)}")
        else:
            written |= {} if path is None else {name: path}
    return written


class TensorBoard:
    """Writes an event file for TensorBoard, which then hides what an earlier run wrote after the step at which this one starts.

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
            raise ConfigError.of(
                "missing-package", f"use_tensorboard: expected TensorBoard, got: {error} (pip install tensorboard)"
            ) from None
        self._folder = folder
        self._event = Event
        self._summary = Summary
        self._histogram = HistogramProto
        self._writer = RecordWriter
        self._parameters = parameters
        self._begin = [
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            # What an earlier run wrote from this step on is hidden: the last epoch, at `step`, is not repeated.
            Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START)),
        ]
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"

    def epoch(self, report: EpochReport) -> None:
        numbers = metrics(report)
        for rank, seconds in enumerate(report.seconds) if len(report.seconds) <= FEW_RANKS else ():
            numbers |= {f"time of rank {rank}/{name}": value for name, value in seconds.items()}
        histograms = []
        for name, array in self._parameters() if self._parameters is not None else ():
            if (counts := histogram(array)) is not None:
                histograms.append(self._summary.Value(tag=f"parameters/{name}", histo=self._histogram(**counts)))
        self._write(report.global_step, numbers, histograms)

    def step(self, record: StepRecord) -> None:
        self._write(record.global_step, step_metrics(record))

    def evaluation(self, report: EvaluationReport) -> None:
        self._write(report.global_step, evaluation_metrics(report))

    def _write(self, step: int, numbers: Mapping[str, float], histograms: Sequence[Any] = ()) -> None:
        values = [*(self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()), *histograms]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            writer = self._writer(file)
            for message in [*self._begin, event]:
                writer.write(message.SerializeToString())
        self._begin = []


BINS = 64
"""The number of bins of a histogram."""


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
