"""A finished or running training, read back from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import DataError


@dataclass(frozen=True)
class Run:
    """What a training's folder tells.

    Attributes:
        name: the folder's name, longer where that is not enough to tell runs apart.
        epochs: the lines of scores.jsonl, by epoch; of an epoch that was done twice the later one.
        starts: the lines of starts.jsonl, oldest first.
    """

    name: str
    epochs: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]]

    def scores(self, name: str) -> tuple[list[int], list[float]]:
        """The epochs that have a score, and its values."""
        found = [(one["epoch"], float(one["scores"][name])) for one in self.epochs if name in one["scores"]]
        return [epoch for epoch, _ in found], [value for _, value in found]


def read_runs(folders: list[Path]) -> list[Run]:
    """Read several runs. Raises: DataError: there is no scores.jsonl, or a line of it is broken."""
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _read(folder: Path, name: str) -> Run:
    epochs = {line["epoch"]: line for line in _lines(folder / "scores.jsonl")}
    if not epochs:
        raise DataError(f"{folder / 'scores.jsonl'}: expected at least one finished epoch, got none")
    starts = list(_lines(folder / "starts.jsonl")) if (folder / "starts.jsonl").exists() else []
    return Run(name, [epochs[epoch] for epoch in sorted(epochs)], starts)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{path}: expected the file that a training writes beside its model, got: {error.strerror} "
            "(the folder is that of the key `model`)"
        ) from None
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: expected JSON, got: {error.msg}") from None
    return lines


def _names(folders: list[Path]) -> list[str]:
    """As few of the last parts of the paths as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(len(path) for path in parts) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(path[-1:])} ({number})" for number, path in enumerate(parts, start=1)]
