"""scores.jsonl and steps.jsonl: one line of JSON per epoch, and per recorded step, for scripts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeVar

from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.steps import StepRecord


def as_line(report: EpochReport) -> dict[str, Any]:
    """A report as it is written to the file, without what is None and seconds_before = 0; scores that are not finite become
    strings.
    """
    scores = {name: _finite(value) for name, value in report.scores.items()}
    line = {**asdict(report), "scores": scores, "seconds_before": report.seconds_before or None}
    return {name: value for name, value in line.items() if value is not None}


class JsonLines:
    """Writes one line of JSON per epoch to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def epoch(self, report: EpochReport) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(as_line(report)) + "\n")

    def go_on(self, epoch: int, last: Mapping[str, Any] | None) -> None:
        """Bring the file into line with a training that resumes after `epoch`.

        A killed run can leave half a line or no line for its last epoch. When training resumes from an older checkpoint, the
        file has lines of later epochs, which are removed.

        Args:
            epoch: the last finished epoch.
            last: its line as the checkpoint has it, written if the file has none.
        """
        lines: dict[int, str] = dict(_lines(self._path, lambda line: int(line["epoch"])))
        if last is not None and epoch not in lines:
            lines[epoch] = json.dumps(last)
        _rewrite(self._path, [lines[number] for number in sorted(lines) if number <= epoch])


def as_step_line(record: StepRecord) -> dict[str, Any]:
    """A record as it is written to the file; numbers that are not finite become strings."""
    line = asdict(record)
    del line["global_step"]
    scores = {name: _finite(value) for name, value in record.scores.items()}
    return {**line, "scores": scores, "gradient_norm": _finite(record.gradient_norm)}


class StepLines:
    """Writes one line of JSON per record of a step to a file, at once, so that others can read along."""

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
        """Remove what a training that resumes will write again, and a line that a killed run left half written.

        Args:
            epoch, step: the first epoch that is not finished, and its completed steps.
        """
        lines = _lines(self._path, lambda line: (int(line["epoch"]), int(line["step"])))
        _rewrite(self._path, [line for place, line in lines if place <= (epoch, step)])


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


P = TypeVar("P")


def _lines(path: Path, place: Callable[[Any], P]) -> list[tuple[P, str]]:
    """The lines of a file, with what `place` finds in them; without those that are no JSON, or where it finds nothing."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                found.append((place(json.loads(line)), line))
    return found


def _rewrite(path: Path, lines: list[str]) -> None:
    """Replace a file by one with these lines, unless it has them."""
    wanted = "".join(f"{line}\n" for line in lines)
    if (path.read_text(encoding="utf-8") if path.exists() else "") != wanted:
        unfinished = path.with_name(path.name + ".unfinished")
        unfinished.write_text(wanted, encoding="utf-8")
        os.replace(unfinished, path)
