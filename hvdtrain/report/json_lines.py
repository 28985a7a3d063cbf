"""scores.jsonl: one line of JSON per epoch, for scripts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.report.epoch import EpochReport


def as_line(report: EpochReport) -> dict[str, Any]:
    """A report as it is written to the file; scores that are not finite become strings."""
    scores = {name: value if math.isfinite(value) else str(value) for name, value in report.scores.items()}
    line = {**asdict(report), "scores": scores}
    absent = {"loss_scale": None, "seconds_before": 0.0}
    return {name: value for name, value in line.items() if name not in absent or value != absent[name]}


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
        lines = {}
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    lines[int(json.loads(line)["epoch"])] = line
        if last is not None and epoch not in lines:
            lines[epoch] = json.dumps(last)
        wanted = "".join(f"{lines[number]}\n" for number in sorted(lines) if number <= epoch)
        if (self._path.read_text(encoding="utf-8") if self._path.exists() else "") != wanted:
            unfinished = self._path.with_name(self._path.name + ".unfinished")
            unfinished.write_text(wanted, encoding="utf-8")
            os.replace(unfinished, self._path)
