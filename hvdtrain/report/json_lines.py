"""Reports for scripts: a line of JSON per epoch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from hvdtrain.report.epoch import EpochReport


class JsonLines:
    """Appends one line of JSON per epoch to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def epoch(self, report: EpochReport) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fields = asdict(report)
        fields["scores"] = {name: value if math.isfinite(value) else str(value) for name, value in report.scores.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")
