"""The record of a training's starts (starts.jsonl), and reading finished or running trainings back from their folders."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.version import __version__

PACKAGES = ("torch", "tensorflow", "tensorflow-cpu", "keras", "horovod", "mpi4py", "numpy", "h5py")


def versions() -> dict[str, str]:
    """The versions of Python, hvdtrain and `PACKAGES`, found without importing them."""
    found = {"hvdtrain": __version__, "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Start:
    """One start of a training: a line of starts.jsonl.

    Attributes:
        hosts: (host, device) of every rank.
        settings: (value as text, origin) of every key.
        first_epoch: the epoch that training starts or resumes with.
    """

    hosts: Sequence[tuple[str, str]]
    settings: Mapping[str, tuple[str, str]]
    first_epoch: int
    num_parameters: int
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %z"))
    command: str = field(default_factory=lambda: " ".join(sys.argv))
    versions: Mapping[str, str] = field(default_factory=versions)


def note_start(folder: Path, start: Start) -> None:
    """Append a line to the folder's starts.jsonl. Raises: ConfigError, if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(start)) + "\n")
    except OSError as error:
        raise ConfigError([f"model: expected a folder that can be written to, got {folder}: {error.strerror}"]) from None


@dataclass(frozen=True)
class Run:
    """A training as its folder records it.

    Attributes:
        name: the folder's name, with as many parent folders as it takes to distinguish the runs.
        epochs: the lines of scores.jsonl in the order of epochs; the last line of an epoch that was trained twice.
        starts: the lines of starts.jsonl, oldest first.
    """

    name: str
    epochs: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]]

    def scores(self, name: str) -> tuple[list[int], list[float]]:
        """The epochs that have a score, and its value in each."""
        found = [(one["epoch"], float(one["scores"][name])) for one in self.epochs if name in one["scores"]]
        return [epoch for epoch, _ in found], [value for _, value in found]


def read_runs(folders: list[Path]) -> list[Run]:
    """Read several runs. Raises: DataError, if scores.jsonl is missing or a line of it is malformed."""
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
    """The shortest ends of the paths that differ from each other."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(len(path) for path in parts) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(path[-1:])} ({number})" for number, path in enumerate(parts, start=1)]
