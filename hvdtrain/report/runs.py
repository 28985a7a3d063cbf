"""What trainings were started with (starts.jsonl), and finished or running trainings, read back from their folders."""

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
    """The versions of Python, of hvdtrain and of the packages that matter; nothing is imported."""
    found = {"hvdtrain": __version__, "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Start:
    """One start of a training.

    Attributes:
        hosts: by rank, its host and device.
        settings: by key, its value as text and where that came from.
        first_epoch: the epoch that training began or went on with.
    """

    hosts: Sequence[tuple[str, str]]
    settings: Mapping[str, tuple[str, str]]
    first_epoch: int
    num_parameters: int
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %z"))
    command: str = field(default_factory=lambda: " ".join(sys.argv))
    versions: Mapping[str, str] = field(default_factory=versions)


def note_start(folder: Path, start: Start) -> None:
    """Add a line to the folder's starts.jsonl. Raises: ConfigError, if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(start)) + "\n")
    except OSError as error:
        raise ConfigError([f"model: expected a folder that can be written to, got {folder}: {error.strerror}"]) from None


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
