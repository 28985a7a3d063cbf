"""A folder of checkpoints: each complete or not there at all, and which are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import isnan
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError, ConfigError

UNFINISHED = ".unfinished"

KEEP_OPTIMIZERS = 2
"""Of so many finished epochs the optimizer is kept."""


@dataclass(frozen=True)
class Checkpoint:
    """The files of one checkpoint.

    Attributes:
        epoch: the finished epoch, or the one under way.
        start: the folder and how all its files' names begin.
        suffix: how they end; of the framework.
        step: steps done in the whole training, if the epoch is under way.
    """

    epoch: int
    start: Path
    suffix: str
    step: int | None = None

    @property
    def model_file(self) -> Path:
        return self._file("")

    @property
    def optimizer_file(self) -> Path:
        return self._file(".opt")

    def own_file(self, rank: int, size: int) -> Path:
        """What one rank saves of its own."""
        return self._file(f".rank-{rank}-of-{size}")

    def is_part(self, name: str) -> bool:
        """Whether this is the name of the optimizer's file or of some rank's own."""
        pattern = rf"{re.escape(self.start.name)}\.(opt|rank-\d+-of-\d+)\.{re.escape(self.suffix)}"
        return re.fullmatch(pattern, name) is not None

    def _file(self, part: str) -> Path:
        return self.start.with_name(f"{self.start.name}{part}.{self.suffix}")

    @property
    def age(self) -> tuple[int, float]:
        """Later checkpoints have a larger one."""
        return self.epoch, float("inf") if self.step is None else self.step


class CheckpointFolder:
    """The checkpoints that share a prefix.

    Args:
        prefix: the config's key `model`, such as exp/g2p/model.
        suffix: of the framework's files.
    """

    def __init__(self, prefix: Path, suffix: str = "pt") -> None:
        self.suffix = suffix
        self._prefix = prefix
        self._pattern = re.compile(
            rf"{re.escape(prefix.name)}\.(?P<epoch>\d+)(\.step-(?P<step>\d+))?(?P<part>\.(opt|rank-\d+-of-\d+))?\.{re.escape(suffix)}"
        )

    def at(self, epoch: int, step: int | None = None) -> Checkpoint:
        """The files of an epoch, finished or (with a step) under way, whether they exist or not."""
        name = f"{self._prefix.name}.{epoch:03d}" + ("" if step is None else f".step-{step}")
        return Checkpoint(epoch, self._prefix.with_name(name), self.suffix, step)

    def finished(self) -> list[int]:
        """The epochs at whose end a model was saved, in order."""
        return [found.epoch for found in self._found() if found.step is None]

    def newest(self) -> Checkpoint | None:
        """The last checkpoint that training can go on from."""
        return next((found for found in reversed(self._found()) if found.optimizer_file.exists()), None)

    def prepare(self, target: Checkpoint) -> None:
        """Make the folder, and remove what stands under the names of a checkpoint that is about to be written. (Were it
        replaced file by file, a kill in between would leave files that do not belong together.) Raises: CheckpointError.
        """
        with _told(target.model_file):
            self._prefix.parent.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            target.model_file.unlink(missing_ok=True)

    def save_own(self, file: Path, write: Callable[[Path], None]) -> None:
        """Write one rank's own file of a checkpoint that is being written. Raises: CheckpointError."""
        unfinished = file.with_name(file.name + UNFINISHED)
        with _told(file):
            write(unfinished)
            _to_disk(unfinished)
            os.replace(unfinished, file)

    def save(self, epoch: int, write: Callable[[Path, Path], None], *, step: int | None = None) -> Checkpoint:
        """Write the model and the optimizer; afterwards the checkpoint is complete.

        Args:
            write: writes the model's and the optimizer's file under the paths it is given.
            step: steps done in the whole training, if the epoch is under way.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written to.
        """
        target = self.at(epoch, step)
        unfinished = [path.with_name(path.name + UNFINISHED) for path in (target.model_file, target.optimizer_file)]
        try:
            self.prepare(target)
            with _told(target.model_file):
                write(unfinished[0], unfinished[1])
                for path in unfinished:
                    _to_disk(path)
                os.replace(unfinished[1], target.optimizer_file)
                os.replace(unfinished[0], target.model_file)
                _to_disk(self._prefix.parent)
                self.tidy(target)
        except CheckpointError:
            self._remove_unfinished()
            raise
        return target

    def tidy(self, newest: Checkpoint, keep_optimizers: int = KEEP_OPTIMIZERS) -> None:
        """Remove what a new checkpoint made useless: those within epochs, and all but the last finished epochs' optimizers
        (which are as large as the model, or larger).
        """
        names = [self._pattern.fullmatch(path.name) for path in self._files()]
        within = {self.at(int(match["epoch"]), int(match["step"])) for match in names if match and match["step"]}
        self.remove(within - {newest})  # also what a kill left of them: parts without a model
        with_optimizer = [self.at(epoch) for epoch in self.finished() if self.at(epoch).optimizer_file.exists()]
        for checkpoint in with_optimizer[:-keep_optimizers]:
            self._remove_all_but_model(checkpoint)

    def remove(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Remove checkpoints, of each the model first: what is left of it by a kill is none."""
        for checkpoint in checkpoints:
            checkpoint.model_file.unlink(missing_ok=True)
            self._remove_all_but_model(checkpoint)

    def _remove_all_but_model(self, checkpoint: Checkpoint) -> None:
        for path in self._files():
            if checkpoint.is_part(path.name):
                path.unlink(missing_ok=True)

    def _found(self) -> list[Checkpoint]:
        """Every complete checkpoint, oldest first."""
        matches = [self._pattern.fullmatch(path.name) for path in self._files()]
        models = [match for match in matches if match and not match["part"]]
        found = [self.at(int(match["epoch"]), int(match["step"]) if match["step"] else None) for match in models]
        return sorted(found, key=lambda checkpoint: checkpoint.age)

    def _remove_unfinished(self) -> None:
        """Remove what a killed run left behind."""
        for path in self._files():
            if path.name.startswith(f"{self._prefix.name}.") and path.name.endswith(UNFINISHED):
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        folder = self._prefix.parent
        return list(folder.iterdir()) if folder.is_dir() else []


@contextmanager
def _told(file: Path) -> Iterator[None]:
    """Say which checkpoint could not be written, and why."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where the disk is full
        raise CheckpointError(f"{file}: expected to write a checkpoint, got: {error}") from error


def _to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, has reached the disk: a rename must not overtake its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class CleanupRule:
    """The models to keep: the last ones, the best ones by every score, and those of some epochs.

    Attributes:
        keep: these epochs; None: some of all times, fewer of them the longer the training is.
    """

    keep_last_n: int = 2
    keep_best_n: int = 4
    keep: Sequence[int] | None = None

    def kept(self, epochs: Iterable[int], scores: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The epochs to keep, ascending.

        Args:
            epochs: those whose model is there.
            scores: by epoch, its scores by name; the smaller the better.
        """
        there = sorted(epochs)
        if max(self.keep_last_n, self.keep_best_n) >= len(there):
            return there
        wanted = set(self.keep if self.keep is not None else _pattern(there[-1])) | set(there[-self.keep_last_n :])
        for name in sorted({name for epoch in there for name in scores.get(epoch, {})}):
            wanted.update(self._best(there, {epoch: scores.get(epoch, {}).get(name) for epoch in there}))
        return [epoch for epoch in there if epoch in wanted]

    def _best(self, epochs: list[int], scores: Mapping[int, float | None]) -> list[int]:
        """The epochs with the smallest scores; none where all are equal. An epoch without a score counts as the worst one."""
        known = [score for score in scores.values() if score is not None and not isnan(score)]
        if not known or min(known) == max(known):
            return []

        def rank(epoch: int) -> tuple[float, int]:
            score = scores[epoch]
            return (max(known) if score is None or isnan(score) else score), epoch

        return sorted(epochs, key=rank)[: self.keep_best_n]


def _pattern(last: int) -> set[int]:
    """Epochs to keep of a training up to the epoch `last`: multiples of a number, and doublings of another."""
    if last <= 10:
        every, doubled = 4, 5
    elif last <= 50:
        every, doubled = 20, 5
    elif last <= 100:
        every, doubled = 40, 10
    else:
        every, doubled = 80 * (1 << (last // 240).bit_length()), 20
    doublings = {doubled << power for power in range(last.bit_length())}
    return set(range(every, last + 1, every)) | {epoch for epoch in doublings if epoch <= last}


def parse_rule(value: bool | dict[str, Any]) -> CleanupRule | None:
    """The key `cleanup_old_models`: True, or a dict of the rule's attributes; None where nothing is to be removed.

    Raises:
        ConfigError: other entries, or entries of another type.
    """
    if isinstance(value, bool):
        return CleanupRule() if value else None
    names = [field.name for field in fields(CleanupRule)]
    problems = [
        f"cleanup_old_models.{name}: expected one of {', '.join(names)}, got {name!r}" for name in value if name not in names
    ]
    least = {"keep_last_n": 1, "keep_best_n": 0}
    for name, smallest in least.items():
        number = value.get(name, smallest)
        if not isinstance(number, int) or number < smallest:
            problems.append(f"cleanup_old_models.{name}: expected an integer, {smallest} or more, got {number!r}")
    keep = value.get("keep", [])
    if not isinstance(keep, (list, tuple, set)) or not all(isinstance(epoch, int) for epoch in keep):
        problems.append(f"cleanup_old_models.keep: expected a list of epochs, got {keep!r}")
    if problems:
        raise ConfigError(problems)
    return CleanupRule(**value)
