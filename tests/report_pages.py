"""Trainings as they are read by a report, and what is in its page."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.json_lines import as_line

REPORT = EpochReport(
    epoch=3,
    steps=10,
    global_step=30,
    elapsed=12.0,
    computing=0.99,
    learning_rate=0.5,
    num_sequences=100,
    scores={"train_loss_ce": 2.0, "dev_loss_ce": 1.5, "dev_loss_fer": float("nan")},
    padding={"data": 0.25},
    seconds=[{"compute": 10.0}, {"compute": 8.0}],
)


def shown(page: Path) -> dict[str, Any]:
    """The figures in a page, by name."""
    found = re.search(r"<script type=application/json id=data>(.*?)</script>", page.read_text(), flags=re.S)
    assert found is not None
    return {figure["name"]: figure for figure in json.loads(found[1])["figures"]}


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Those of a JSON Lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_folder(folder: Path, steps: int = 0) -> Path:
    """A run of two epochs, as a training without starts.jsonl left it, and `steps` lines of steps.jsonl in each epoch."""
    folder.mkdir(parents=True)
    write_lines(folder / "scores.jsonl", [as_line(replace(REPORT, epoch=epoch, global_step=10 * epoch)) for epoch in (1, 2)])
    within = [
        {
            "epoch": epoch,
            "step": step,
            "progress": step / steps,
            "elapsed": step / 2,
            "learning_rate": 0.1 * step,
            "scores": {"ce": -step},
        }
        for epoch in (1, 2)
        for step in range(1, steps + 1)
    ]
    if steps:
        write_lines(folder / "steps.jsonl", within)
    return folder
