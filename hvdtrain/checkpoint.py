"""Checkpoints on disk: `<model>.<epoch>.pt` and `<model>.<epoch>.opt.pt`, complete or not there at all.

Both files are written under other names first. The optimizer's is renamed first, the model's last: where there is a model
file there is everything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import CheckpointError

UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Checkpoint:
    """The files of one finished epoch."""

    epoch: int
    model_file: Path
    optimizer_file: Path


class CheckpointFolder:
    """The checkpoints that share a prefix.

    Args:
        prefix: the config's key `model`, such as exp/g2p/model.
        suffix: of the framework's files.
    """

    def __init__(self, prefix: Path, suffix: str = "pt") -> None:
        self._prefix = prefix
        self._suffix = suffix

    def at(self, epoch: int) -> Checkpoint:
        """The files of an epoch, whether they exist or not."""
        name = f"{self._prefix.name}.{epoch:03d}"
        folder = self._prefix.parent
        return Checkpoint(epoch, folder / f"{name}.{self._suffix}", folder / f"{name}.opt.{self._suffix}")

    def newest(self) -> Checkpoint | None:
        """The last finished epoch's checkpoint that training can go on from."""
        pattern = re.compile(rf"{re.escape(self._prefix.name)}\.(\d+)\.{self._suffix}")
        found = [pattern.fullmatch(path.name) for path in self._files()]
        epochs = sorted((int(match[1]) for match in found if match), reverse=True)
        return next((self.at(epoch) for epoch in epochs if self.at(epoch).optimizer_file.exists()), None)

    def save(self, epoch: int, write: Callable[[Path, Path], None], keep_optimizers: int = 2) -> Checkpoint:
        """Write an epoch's checkpoint.

        Args:
            write: writes the model's and the optimizer's file under the paths it is given.
            keep_optimizers: so many optimizer files are kept; older ones are of no use and as large as the model or larger.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written to.
        """
        target = self.at(epoch)
        unfinished = [path.with_name(path.name + UNFINISHED) for path in (target.model_file, target.optimizer_file)]
        try:
            self._prefix.parent.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            write(unfinished[0], unfinished[1])
            for path in unfinished:
                _to_disk(path)
            os.replace(unfinished[1], target.optimizer_file)
            os.replace(unfinished[0], target.model_file)
            _to_disk(self._prefix.parent)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError where the disk is full
            self._remove_unfinished()
            raise CheckpointError(f"{target.model_file}: expected to write a checkpoint, got: {error}") from error
        if epoch > keep_optimizers:
            self.at(epoch - keep_optimizers).optimizer_file.unlink(missing_ok=True)
        return target

    def _remove_unfinished(self) -> None:
        """Remove what a killed run left behind."""
        for path in self._files():
            if path.name.startswith(f"{self._prefix.name}.") and path.name.endswith(UNFINISHED):
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        folder = self._prefix.parent
        return list(folder.iterdir()) if folder.is_dir() else []


def _to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, has reached the disk: a rename must not overtake its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
