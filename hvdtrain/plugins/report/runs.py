"""Finished or running trainings, read from their folders."""

from __future__ import annotations

import json
import math
import sys
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.errors import DataError
from hvdtrain.plugins.report.state import State, read_state
from hvdtrain.report.json_lines import DAMAGED_LINE_ERRORS
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure, is_higher_better, wanted_of


@dataclass(frozen=True)
class Run:
    """A training, read from its folder.

    Attributes:
        name: the folder's name, with as many parent folders as are needed to distinguish the runs.
        epochs: the lines of scores.jsonl in the order of epochs; the last line for an epoch that was trained twice.
        starts: the lines of starts.jsonl, oldest first.
        steps: the lines of steps.jsonl in the order of steps; the last ones for steps that were trained twice.
        evaluations: the lines of evaluations.jsonl, in the same way.
        summary: the model layer by layer, as in summary.json; None: unknown.
        state: whether it is running, or how it ended.
    """

    name: str
    epochs: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]] = ()
    steps: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] | None = None
    evaluations: Sequence[Mapping[str, Any]] = ()
    state: State = State()

    @property
    def start(self) -> Mapping[str, Any]:
        """The last start; empty: there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def last(self) -> Mapping[str, Any]:
        """The last epoch; empty: there is none."""
        return self.epochs[-1] if self.epochs else {}

    @property
    def settings(self) -> Mapping[str, Sequence[str]]:
        """The keys at the last start: by name, the value as text and its origin."""
        return self.start.get("settings") or {}

    def scores(self, name: str) -> tuple[list[int], list[float]]:
        """The epochs that have a score, and its value in each."""
        points = [(line["epoch"], float(line["scores"][name])) for line in self.epochs if name in line["scores"]]
        return [epoch for epoch, _ in points], [value for _, value in points]

    def setting(self, name: str) -> Any:
        """A key's value at the last start; None if it is unknown or not a Python literal."""
        with suppress(ValueError, SyntaxError):
            return literal_eval((self.settings.get(name) or ["None"])[0])
        return None

    @property
    def measure(self) -> str | None:
        """The score that determines the best epoch: the config's, or the loss that is minimized."""
        wanted = self.setting("early_stopping_measure") or self.setting("learning_rate_control_error_measure")
        history = [EpochRecord(line["epoch"], 0.0, line["scores"], line.get("losses") or {}) for line in self.epochs]
        return Measure(wanted_of(wanted), self.setting("higher_is_better") or []).name(history)

    def is_higher_better(self, name: str) -> bool:
        """Whether higher values of a score are better, according to the config."""
        return is_higher_better(name, self.setting("higher_is_better") or [])

    def best(self, name: str | None) -> tuple[int, float] | None:
        """The first epoch with the best value of a score, and that value; None if no epoch that may be the best has one."""
        if name is None:
            return None
        never = {line["epoch"] for line in self.epochs if not line.get("updated", True) or line.get("diverged")}
        scores = zip(*self.scores(name), strict=True)
        points = [(epoch, value) for epoch, value in scores if math.isfinite(value) and epoch not in never]
        sign = -1 if self.is_higher_better(name) else 1
        return min(points, key=lambda pair: sign * pair[1], default=None)


def read_runs(folders: list[Path], names: Sequence[str] | None = None, *, running: bool = False) -> list[Run]:
    """Read several runs.

    Args:
        names: their names; None: the shortest ones that distinguish the folders.
        running: whether the runs are still training, so that they may have no finished epoch yet.

    Raises:
        DataError: scores.jsonl is missing, or none of its lines has an epoch. Other damaged lines cause warnings on stderr.
    """
    return [_read(folder, name, running) for folder, name in zip(folders, names or names_of(folders), strict=True)]


def _read(folder: Path, name: str, running: bool) -> Run:
    scores = folder / "scores.jsonl"
    is_early = running or (folder / "starts.jsonl").exists()
    lines, problems = _lines(scores) if not is_early or scores.exists() else ([], [])
    epochs = {line["epoch"]: line for line in lines}
    starts, more = _lines(folder / "starts.jsonl", start_of_line) if (folder / "starts.jsonl").exists() else ([], [])
    if not epochs and (problems or not (running or starts)):
        raise DataError(problems[0] if problems else f"{scores}: expected at least one finished epoch, got none")
    for problem in () if running else (*problems, *more):
        print(f"warning: {problem}; the page omits it", file=sys.stderr)  # noqa: T201 this is a command
    steps, evaluations = (read_steps(folder / file) for file in ("steps.jsonl", "evaluations.jsonl"))
    run = Run(name, [epochs[epoch] for epoch in sorted(epochs)], starts, steps, _summary(folder), evaluations)
    wanted = run.setting("num_epochs")
    is_complete = bool(epochs) and isinstance(wanted, int) and max(epochs) >= wanted
    return replace(run, state=read_state(folder, run.setting("model"), is_complete=is_complete))


def _summary(folder: Path) -> Mapping[str, Any] | None:
    """The model layer by layer; None if the file is missing or damaged."""
    with suppress(OSError, *DAMAGED_LINE_ERRORS, AttributeError):
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        layers = [
            {
                "name": str(row["name"]),
                "type": str(row["type"]),
                "num_parameters": int(row["num_parameters"]),
                "num_trainable": int(row["num_trainable"]),
                "parameters": [
                    {"name": str(parameter["name"]), "shape": [int(size) for size in parameter["shape"]]}
                    for parameter in row["parameters"]
                ],
            }
            for row in summary["layers"]
        ]
        return {**summary, "num_parameters": int(summary["num_parameters"]), "layers": layers}
    return None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of a steps.jsonl; none if it does not exist.

    Damaged lines, which a killed training or a full disk may leave, are skipped. If a training was resumed from an older
    checkpoint, the steps after it are in the file twice: the later lines are returned.
    """
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(*DAMAGED_LINE_ERRORS, AttributeError):
            line = json.loads(text)
            position = _position(line)
            line = {name: value for name, value in line.items() if name not in STEP or is_like(value, STEP[name])}
            line["scores"] = {str(name): float(value) for name, value in line["scores"].items()}
            while lines and _position(lines[-1]) >= position:
                lines.pop()
            lines.append(line)
    return lines


def _position(line: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and step of a line of steps.jsonl. Raises: KeyError or TypeError, if these or its share of the epoch are missing."""
    float(line["progress"])  # a line without it cannot be placed on an axis
    return int(line["epoch"]), int(line["step"])


def start_of_line(line: Any) -> dict[str, Any]:
    """A line of starts.jsonl. Raises one of `DAMAGED_LINE_ERRORS`."""
    if not isinstance(line, dict):
        raise TypeError("no dict")
    entries: dict[str, Any] = {name: value for name, value in line.items() if name not in START or is_like(value, START[name])}
    entries["settings"] = {name: pair for name, pair in (entries.get("settings") or {}).items() if pair and len(pair) == 2}
    entries["hosts"] = [pair for pair in entries.get("hosts") or [] if pair and len(pair) == 2]
    return entries


NUMBER: Any = 0.0

START: Mapping[str, Any] = {
    **dict.fromkeys(("directory", "time", "command", "commit"), ""),
    **dict.fromkeys(("first_epoch", "num_parameters"), NUMBER),
    **dict.fromkeys(("texts", "versions"), {"": ""}),
    "settings": {"": [""]},
    "hosts": [[""]],
    "goodput": {"": NUMBER},
}
"""Examples of the entries of a line of starts.jsonl."""


def is_like(value: Any, example: Any) -> bool:
    """Whether a value has the same types as an example throughout, or is None.

    >>> is_like([{"compute": 1.5}], [{"": 0.0}]), is_like("<img>", 0.0), is_like([["host", "CPU"]], [[""]])
    (True, False, True)
    """
    if value is None:
        return True
    if isinstance(example, dict):
        return isinstance(value, dict) and all(
            entry is not None and is_like(entry, inner) for inner in example.values() for entry in value.values()
        )
    if isinstance(example, list):
        return isinstance(value, list) and all(
            entry is not None and is_like(entry, inner) for inner in example for entry in value
        )
    if isinstance(example, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, type(example))


def _epoch(line: Any) -> dict[str, Any]:
    """A line of scores.jsonl, without entries of unexpected types. Raises one of `DAMAGED_LINE_ERRORS`."""
    scores = {str(name): float(value) for name, value in dict(line["scores"]).items()}
    entries = {name: value for name, value in line.items() if name in EPOCH and is_like(value, EPOCH[name])}
    if not entries.get("elapsed"):
        entries.pop("computing", None)  # a share of no time
    if not entries.get("seconds"):
        entries.pop("seconds", None)
    return {"learning_rate": None, **entries, "epoch": int(line["epoch"]), "scores": scores}


EPOCH: Mapping[str, Any] = {
    **dict.fromkeys(("steps", "global_step", "elapsed", "computing", "learning_rate", "num_sequences", "loss_scale"), NUMBER),
    **dict.fromkeys(("syncs", "sent", "sent_between_groups", "seconds_before", "epoch_learning_rate", "updated"), NUMBER),
    "diverged": True,
    **dict.fromkeys(("padding", "learning_rates", "losses"), {"": NUMBER}),
    "seconds": [{"": NUMBER}],
    "goodput": {"": NUMBER},
    "flops": {"": NUMBER},
}
"""Examples of the entries of a line of scores.jsonl, for their types."""

STEP: Mapping[str, Any] = {
    **dict.fromkeys(("progress", "elapsed", "learning_rate", "sequences_per_second", "memory", "computing", "data_wait"), NUMBER),
    "frames_per_second": {"": NUMBER},
}
"""Examples of the entries of a line of steps.jsonl, except for scores and the gradients' norm."""


def _lines(path: Path, parse: Callable[[Any], dict[str, Any]] = _epoch) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of a file, without an unfinished one at its end, and the problems with its damaged lines. Raises: DataError."""
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path}: expected the file that a training writes next to its model, got: {error.strerror} "
            "(the key `model` of the config determines the folder)"
        ) from None
    entries = []
    problems = []
    for number, line in enumerate([*lines, last], start=1):
        try:
            entries.append(parse(json.loads(line.decode("utf-8"))))
        except (*DAMAGED_LINE_ERRORS, AttributeError) as error:
            if number > len(lines):
                break
            problems.append(f"{path}, line {number}: expected JSON, got: {getattr(error, 'msg', repr(error))}")
    return entries, problems


def names_of(folders: list[Path]) -> list[str]:
    """The shortest suffixes of the paths that are all different."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(len(path) for path in parts) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(path[-1:])} ({number})" for number, path in enumerate(parts, start=1)]
