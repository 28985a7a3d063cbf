"""A file with the numbers of a running training in Prometheus's text format, for the textfile collector of node_exporter."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import get_args

from hvdtrain.disk.atomic import write_atomically
from hvdtrain.plugins.trackers.services import RunDescription, Tracker
from hvdtrain.report.ends import Status
from hvdtrain.version import __version__

LABELLED = {
    "steps/train": ("running_score", "score"),
    "steps/frames_per_second": ("frames_per_second", "key"),
    "time": ("epoch_seconds", "activity"),
    "time share": ("epoch_time_share", "activity"),
    "time of the slowest rank": ("epoch_seconds_of_slowest_rank", "activity"),
    "padding": ("padding", "key"),
    "exchange": ("exchange", "what"),
}
"""By the group of a number, the metric's name and the label that has the rest of the number's name."""

MEANINGS = {
    "info": "1; facts about the training",
    "status": "1 for the present state: running, finished, stopped or failed",
    "updated_timestamp_seconds": "when this file was written",
    "epoch": "the epoch that is trained, or the last one",
    "step": "the finished steps of the whole training",
    "score": "a score of the last evaluation or finished epoch",
    "running_score": "the mean of a loss over the last steps",
    "learning_rate": "of the last update",
    "sequences_per_second": "of all ranks, over the last steps",
    "frames_per_second": "of all ranks without padding, over the last steps",
    "memory": "the most bytes that rank 0 has used",
    "epoch_seconds": "the mean seconds of a rank in the last epoch",
}
STATES = ("running", *get_args(Status))


class MetricsFile(Tracker):
    """Writes the file after every epoch, after evaluations, and when the log has a line about a step.

    It is replaced as a whole, so that nothing ever reads half of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers: dict[str, float] = {}
        self._labels = ""
        self._info = ""
        self._state: Status | None = None
        self.place = str(path)

    def begin(self, run: RunDescription) -> None:
        self._labels = _labels(run=run.name)
        facts = {"ranks": str(len(run.start.hosts)), "parameters": str(run.start.num_parameters), "version": __version__}
        self._info = _labels(run=run.name, folder=str(run.folder), **facts)
        self._numbers["step"] = run.step
        with suppress(OSError):  # the next write reports it; an error here would end the reports
            self._write()

    def log_epoch(self, epoch: int, step: int, numbers: Mapping[str, float]) -> None:
        self._numbers |= {"epoch": epoch, "step": step, **numbers}
        self._write()

    log_steps = log_epoch

    def end(self, status: Status) -> None:
        self._state = status
        self._write()

    def _write(self) -> None:
        """Raises: OSError."""
        write_atomically(self._path, "".join(self._lines()))  # until then under a name that the collector does not read

    def _lines(self) -> Iterator[str]:
        samples: dict[str, list[tuple[str, float]]] = {"info": [(self._info, 1.0)]}
        for state in STATES:
            text = self._labels[:-1] + f',state="{state}"}}'
            samples.setdefault("status", []).append((text, float(state == (self._state or "running"))))
        samples["updated_timestamp_seconds"] = [(self._labels, time.time())]
        for name, value in self._numbers.items():
            metric, labels = _split(name)
            more_labels = "".join(f',{label}="{_escaped(text)}"' for label, text in labels.items())
            samples.setdefault(metric, []).append((f"{self._labels[:-1]}{more_labels}}}", value))
        for metric, values in samples.items():
            if metric in MEANINGS:
                yield f"# HELP hvdtrain_{metric} {MEANINGS[metric]}\n"
            yield f"# TYPE hvdtrain_{metric} gauge\n"
            yield from (f"hvdtrain_{metric}{labels} {float(value)!r}\n" for labels, value in values)


def _split(name: str) -> tuple[str, dict[str, str]]:
    """The name of a metric, and its labels.

    >>> _split("steps/train/ce"), _split("steps/learning_rate")
    (('running_score', {'score': 'ce'}), ('learning_rate', {}))
    >>> _split("dev/ce"), _split("time/data wait")
    (('score', {'dataset': 'dev', 'score': 'ce'}), ('epoch_seconds', {'activity': 'data wait'}))
    """
    for group, (metric, label) in LABELLED.items():
        if name.startswith(f"{group}/"):
            return metric, {label: name.removeprefix(f"{group}/")}
    name = name.removeprefix("steps/")
    dataset, slash, score = name.partition("/")
    if slash:
        return "score", {"dataset": dataset, "score": score}
    return re.sub(r"\W", "_", name), {}


def _labels(**values: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
