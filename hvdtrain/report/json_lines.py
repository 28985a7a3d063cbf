"""JSON files next to the model, for scripts: scores.jsonl, evaluations.jsonl and steps.jsonl, with a line per epoch, per
evaluation within an epoch, and per recorded step.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Any, TypeVar

from hvdtrain.disk.atomic import write_atomically
from hvdtrain.report.epoch import EpochReport, EvaluationReport
from hvdtrain.report.steps import StepRecord
from hvdtrain.runtime import log


def as_line(report: EpochReport) -> dict[str, Any]:
    """A report as it is written to the file, without entries that are None, zero seconds_before, splits, skipped (and updated)
    and sent_between_groups, empty losses, and what only the log shows; scores that are not finite become strings.
    """
    scores = {name: _finite(value) for name, value in report.scores.items()}
    if_any = {
        name: getattr(report, name) or None for name in ("seconds_before", "losses", "splits", "skipped", "sent_between_groups")
    }
    if_any["updated"] = report.updated if report.skipped else None
    line = {**vars(report), **report.measures, "scores": scores, **if_any}  # asdict would copy the seconds of every rank
    return {name: value for name, value in line.items() if value is not None and name not in ONLY_LOGGED}


ONLY_LOGGED = ("computing_of_ranks", "num_frames", "memory", "measures")
"""What only the log shows of a report; the measures are entries of their own."""


class JsonLines:
    """Writes one line of JSON per epoch to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def epoch(self, report: EpochReport) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(as_line(report)) + "\n")

    def go_on(self, epoch: int, last: Mapping[str, Any] | None) -> None:
        """Make the file match a training that resumes after `epoch`.

        A killed run may leave half a line or none for its last epoch. If training resumes from an older checkpoint, the lines of
        later epochs are removed.

        Args:
            epoch: the last finished epoch.
            last: its line from the checkpoint, written if the file has none.
        """
        lines: dict[int, str] = dict(_lines(self._path, lambda line: int(line["epoch"])))
        if last is not None and epoch not in lines:
            lines[epoch] = json.dumps(last)
        _rewrite(self._path, [lines[number] for number in sorted(lines) if number <= epoch])


class EvaluationLines:
    """Writes one line of JSON per evaluation within an epoch to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def evaluation(self, report: EvaluationReport) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {**asdict(report), "scores": {name: _finite(value) for name, value in report.scores.items()}}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def go_on(self, steps: Collection[int]) -> None:
        """Keep only the evaluations after these numbers of steps of the whole training, which a resumed training has done."""
        if self._path.exists():
            lines = _lines(self._path, lambda line: int(line["global_step"]))
            _rewrite(self._path, [line for step, line in lines if step in steps])


def as_step_line(record: StepRecord) -> dict[str, Any]:
    """A record as it is written to the file; numbers that are not finite become strings."""
    line = {name: value for name, value in vars(record).items() if name != "global_step"}
    scores = {name: _finite(value) for name, value in record.scores.items()}
    return {**line, "scores": scores, "gradient_norm": _finite(record.gradient_norm)}


class StepLines:
    """Writes one line of JSON per record of a step to a file, immediately, so that other programs can follow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def step(self, record: StepRecord) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(as_step_line(record)) + "\n")
        self._file.flush()

    def go_on(self, epoch: int, step: int) -> None:
        """Remove the lines that a resumed training will write again, and a line that a killed run left half written.

        Args:
            epoch, step: the first unfinished epoch, and its completed steps.
        """
        lines = _lines(self._path, lambda line: (int(line["epoch"]), int(line["step"])))
        _rewrite(self._path, [line for position, line in lines if position <= (epoch, step)])


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


P = TypeVar("P")


DAMAGED_LINE_ERRORS = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Errors raised by reading a damaged line of JSON: not UTF-8, an infinite epoch, brackets nested too deeply, and so on."""


def _lines(path: Path, position: Callable[[Any], P]) -> list[tuple[P, str]]:
    """The lines of a file, each with its `position`.

    A damaged record must not prevent a training from resuming: a file with damaged lines is renamed, except if it is only the
    last line, which a killed run may have left half written.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        _set_aside(path, f"it cannot be read: {error.strerror}")
        return []
    entries: list[tuple[P, str]] = []
    damaged = []
    for number, line in enumerate([*lines, last], start=1):
        try:
            text = line.decode("utf-8")
            entries.append((position(json.loads(text)), text))
        except DAMAGED_LINE_ERRORS:
            damaged += [number] if number <= len(lines) else []
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        _set_aside(path, f"line {damaged[0]}{more} cannot be read")
    return entries


def _set_aside(path: Path, why: str) -> None:
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    log.warning(f"{path}: {why}; it is kept as {aside.name}, and training continues with the readable lines")


def _rewrite(path: Path, lines: list[str]) -> None:
    """Replace the content of a file by these lines, if it differs."""
    wanted = "".join(f"{line}\n" for line in lines).encode()
    if (path.read_bytes() if path.exists() else b"") != wanted:
        write_atomically(path, wanted)
