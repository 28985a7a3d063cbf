"""A reporter, which its own key switches on, and a tracker, which the key `trackers` names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.starts import Start
from hvdtrain.report.steps import Reporters
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session
from hvdtrain_toy.keys import EpochFileKeys


class EpochFile:
    """Writes a line about every epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def epoch(self, report: EpochReport) -> None:
        with self._path.open("a") as file:
            file.write(f"epoch {report.epoch}: {report.scores['train_loss_square']:.6g}\n")


@contextmanager
def epoch_file(settings: Settings, session: Session, start: Start) -> Iterator[Reporters]:
    """The reporter, if its key is set."""
    path = settings.of(EpochFileKeys).epoch_file
    yield Reporters([] if path is None else [EpochFile(Path(path))])


class Lines:
    """A tracker that appends the names of the numbers of each epoch to a file."""

    def __init__(self, *, path: str) -> None:
        self._path = Path(path)

    def log_epoch(self, epoch: int, step: int, numbers: Mapping[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(f"{epoch} {sorted(numbers)}\n")
