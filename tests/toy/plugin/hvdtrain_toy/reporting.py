"""A reporter, which its own key switches on, and a tracker, which the key `trackers` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdtrain.report.epoch import EpochReport
from hvdtrain.settings import Settings
from hvdtrain_toy.keys import EpochFileKeys


class EpochFile:
    """Writes a line about every epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def epoch(self, report: EpochReport) -> None:
        with self._path.open("a") as file:
            file.write(f"epoch {report.epoch}: {report.scores['train_loss_square']:.6g}\n")


def epoch_file(settings: Settings) -> EpochFile | None:
    """The reporter, if its key is set."""
    path = settings.of(EpochFileKeys).epoch_file
    return None if path is None else EpochFile(Path(path))


class Lines:
    """A tracker that appends the names of the numbers of each epoch to a file."""

    def __init__(self, *, path: str) -> None:
        self._path = Path(path)

    def log_epoch(self, epoch: int, step: int, numbers: Mapping[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(f"{epoch} {sorted(numbers)}\n")
