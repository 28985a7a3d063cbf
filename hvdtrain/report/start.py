"""What a training was started with: a line of JSON per start, in starts.jsonl beside scores.jsonl."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hvdtrain.errors import ConfigError
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
