"""A folder of checkpoints: their names, and writing each atomically.

A checkpoint exists once its model file does: that file is renamed into place last, and removed first.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hvdtrain.checkpoint.files import Checkpoint, checkpoint_error, unfinished_path
from hvdtrain.comm.base import Communicator
from hvdtrain.disk.atomic import UNFINISHED, flush_to_disk, remove_path
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.contents import CheckpointContents
from hvdtrain.learner.frameworks import Framework
from hvdtrain.learner.model_format import SAFETENSORS

ABANDONED = ".abandoned"

KEEP_OPTIMIZERS = 2
"""The number of finished epochs whose optimizer file is kept."""


class MirrorProtocol(Protocol):
    """A second place for the files of checkpoints, such as a `Mirror` of a plug-in. All methods raise CheckpointError."""

    def names(self) -> list[str]:
        """The files in it."""
        ...

    def upload(self, file: Path) -> None:
        """Store a file, whole or not at all."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def fetch_newest(self, comm: Communicator, checkpoints: CheckpointFolder) -> None:
        """Collective. If the newest checkpoint is in the mirror, fetch it to every host that does not have it."""
        ...

    def fetch_models(
        self,
        comm: Communicator,
        checkpoints: CheckpointFolder,
        needed: Callable[[Collection[tuple[int, float]]], Collection[tuple[int, float]]],
    ) -> None:
        """Collective. Fetch to the disk of rank 0 models that only the mirror has, and that the training still needs."""
        ...


class ContentsProtocol(Protocol):
    """What a checkpoint is made of, such as `CheckpointContents`. Both methods raise OSError or RuntimeError."""

    def write(self, model_file: Path, optimizer_file: Path) -> object:
        """Write both files."""
        ...

    def write_running(self, file: Path) -> bool:
        """Write the sums of a running average, and return True; False: there are none."""
        ...


class CheckpointFolder:
    """The checkpoints that share a prefix.

    Args:
        prefix: the config's key `model`, such as exp/g2p/model.
        suffix: the framework's file suffix.
        model_suffix: the suffix of models to write; None: the framework's. Models in all formats are found.
        model_parts, model_marker: as in `Framework`.
        mirror: where all files are copied to, and removed from.

    Attributes:
        note: a file that names a newer checkpoint on a local disk (plug-in local_disk).
        num_pretrain_epochs: the number of first epochs whose checkpoints have `pretrain` in their names, as in RETURNN. Found are
            checkpoints with and without it.
    """

    def __init__(
        self,
        prefix: Path,
        suffix: str = "pt",
        model_suffix: str | None = None,
        model_parts: Sequence[str] = (),
        model_marker: str | None = None,
        mirror: MirrorProtocol | None = None,
    ) -> None:
        self._mirror = mirror
        self.suffix = suffix
        self._model_parts = "|".join(model_parts)  # a pattern
        self._model_marker = model_marker
        self.num_pretrain_epochs = 0
        self.folder = prefix.parent
        self.model_suffixes = tuple(dict.fromkeys((model_suffix or suffix, suffix, SAFETENSORS)))
        self.prefix = prefix
        self.note = prefix.with_name(f"{prefix.name}.local.json")
        pretrain = "" if model_marker is None else r"(?P<pretrain>\.pretrain)?"
        self._pattern = re.compile(
            rf"{re.escape(prefix.name)}{pretrain}\.(?P<epoch>\d+)(\.step-(?P<step>\d+))?"
            rf"(\.(opt|rank-\d+-of-\d+)\.{re.escape(suffix)}|\.running\.npz"
            rf"|\.(?P<model>{'|'.join(map(re.escape, self.model_suffixes))}))"
        )

    def checkpoint_at(self, epoch: int, step: int | None = None) -> Checkpoint:
        """The checkpoint of a finished epoch, or with `step` of one under way, in any format; or the one to write."""
        new = self.new(epoch, step)
        names = (self._is_pretrain(epoch), not self._is_pretrain(epoch))[: 1 if self._model_marker is None else 2]
        possible = [self._checkpoint(epoch, step, suffix, name) for name in names for suffix in self.model_suffixes]
        return next((checkpoint for checkpoint in possible if checkpoint.model_file.exists()), new)

    def new(self, epoch: int, step: int | None = None) -> Checkpoint:
        """A checkpoint to write, which may exist already."""
        return self._checkpoint(epoch, step, self.model_suffixes[0], self._is_pretrain(epoch))

    def _is_pretrain(self, epoch: int) -> bool:
        return epoch <= self.num_pretrain_epochs

    def _checkpoint(self, epoch: int, step: int | None, suffix: str, is_pretrain: bool) -> Checkpoint:
        kind = ".pretrain" if is_pretrain else ""
        name = f"{self.prefix.name}{kind}.{epoch:03d}" + ("" if step is None else f".step-{step}")
        return Checkpoint(epoch, self.prefix.with_name(name), self.suffix, step, None if suffix == self.suffix else suffix)

    def finished_epochs(self) -> list[int]:
        """The finished epochs that have a model, in order."""
        return list(dict.fromkeys(checkpoint.epoch for checkpoint in self._complete_checkpoints() if checkpoint.step is None))

    def models(self, names: Iterable[str] | None = None) -> list[Checkpoint]:
        """All checkpoints that have a model, oldest first; of a model in several formats one.

        Args:
            names: files of another folder; None: those on disk.
        """
        return list({checkpoint.age: checkpoint for checkpoint in self._complete_checkpoints(names)}.values())

    def within_epochs(self) -> list[Checkpoint]:
        """The checkpoints within epochs that have a model, in order."""
        return [checkpoint for checkpoint in self.models() if checkpoint.step is not None]

    def has_name(self, file: Path) -> bool:
        """Whether a file has the name of a checkpoint's file, whether it exists or not."""
        return file.absolute().parent == self.folder.absolute() and self._pattern.fullmatch(file.name) is not None

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that training can continue from: one with an optimizer file, or one of another program where
        these have none."""
        for checkpoint in reversed(self._complete_checkpoints()):
            if checkpoint.optimizer_file.exists() or self.is_from_elsewhere(checkpoint):
                return checkpoint
        return None

    def is_from_elsewhere(self, checkpoint: Checkpoint) -> bool:
        """Whether another program wrote a model, in a format in which this can be recognized."""
        if self._model_marker is None or checkpoint.model_suffix == SAFETENSORS:  # the best within an epoch, of any framework
            return False
        return checkpoint.model_file.exists() and not checkpoint.model_file_as(self._model_marker).exists()

    def older(self, than: Checkpoint) -> list[Checkpoint]:
        """All checkpoints before another one, with or without optimizers, newest first."""
        return [checkpoint for checkpoint in reversed(self._complete_checkpoints()) if checkpoint.age < than.age]

    def prepare(self, target: Checkpoint) -> None:
        """Before writing a checkpoint, create the folder, and remove the model of a checkpoint of the same name, in any format.

        If files were replaced one by one, a kill in between would leave files that do not belong together.

        Raises:
            CheckpointError: the folder cannot be written to.
        """
        with checkpoint_error(target.model_file):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            for suffix in self.model_suffixes:
                self._remove(target.model_file_as(suffix))

    def write_rank(self, file: Path, write: Callable[[Path], None]) -> None:
        """Write one rank's file of a checkpoint that is being written. Raises: CheckpointError."""
        unfinished = unfinished_path(file)
        with checkpoint_error(file, [unfinished]):
            write(unfinished)
            flush_to_disk(unfinished)
            os.replace(unfinished, file)
        self.copy_to_mirror(file)

    def write_model(self, target: Checkpoint, contents: CheckpointContents) -> None:
        """Write only the model of a checkpoint, from which no training continues. Raises: CheckpointError."""
        model = unfinished_path(target.model_file)
        try:
            self.prepare(target)
            with checkpoint_error(target.model_file, [model]):
                self._remove_all_but_model(target, self._names())  # of an abandoned training
                self._remove(target.running_file)
                contents.write_model(model)
                flush_to_disk(model)
                os.replace(model, target.model_file)
                flush_to_disk(self.prefix.parent)
            parts = self._model_parts_of(target, self._names_here())
            self.copy_to_mirror(*(self.folder / name for name in parts), target.model_file)
        except CheckpointError:
            self._remove_unfinished()
            raise

    def tidy_models(self, newest: Checkpoint, keep: Collection[tuple[int, float]]) -> None:
        """Remove the models within epochs whose ages are not to be kept, but for those that a training continues from."""
        keep = {*keep, newest.age}
        superseded = [checkpoint for checkpoint in self.within_epochs() if checkpoint.age not in keep]
        self.remove(checkpoint for checkpoint in superseded if not checkpoint.optimizer_file.exists())

    def write(self, target: Checkpoint, contents: ContentsProtocol, keep_models: Collection[tuple[int, float]] = ()) -> None:
        """Write the model and the optimizer, which completes the checkpoint, and remove what it supersedes.

        Args:
            keep_models: the ages of older checkpoints within epochs whose models stay.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written to.
        """
        self.put(target, contents)
        with checkpoint_error(target.model_file):
            self.tidy(target, keep_models=keep_models)

    def put(self, target: Checkpoint, contents: ContentsProtocol) -> None:
        """The same without removing anything. Raises: CheckpointError."""
        model, optimizer = unfinished_path(target.model_file), unfinished_path(target.optimizer_file)
        running = unfinished_path(target.running_file)
        try:
            self.prepare(target)
            with checkpoint_error(target.model_file, [model, optimizer, running]):
                contents.write(model, optimizer)
                flush_to_disk(model)
                flush_to_disk(optimizer)
                if has_running := contents.write_running(running):
                    flush_to_disk(running)
                    os.replace(running, target.running_file)
                else:
                    self._remove(target.running_file)
                os.replace(optimizer, target.optimizer_file)
                os.replace(model, target.model_file)
                flush_to_disk(self.prefix.parent)
                self.note.unlink(missing_ok=True)
            running_files = [target.running_file] if has_running else []
            parts = [self.folder / name for name in self._model_parts_of(target, self._names_here())]
            self.copy_to_mirror(target.optimizer_file, *running_files, *parts, target.model_file)
        except CheckpointError:
            self._remove_unfinished()
            raise

    def tidy(self, newest: Checkpoint, keep_models: Collection[tuple[int, float]] = ()) -> None:
        """Remove what a new checkpoint supersedes: all other checkpoints within epochs, and the optimizers of all but the last
        finished epochs, as an optimizer file is at least as large as the model. RETURNN's optimizer files stay.

        Epochs after it are of a training that went back, or began anew: the next start would continue from them, and what keeps
        the last models would remove the new ones.
        """
        names = self._names()
        if later := [checkpoint for checkpoint in self.models(names) if checkpoint.step is None and checkpoint.age > newest.age]:
            self._abandon(later, names)
            names = self._names()
        matches = map(self._pattern.fullmatch, names)
        within_epochs = {
            self.checkpoint_at(int(match["epoch"]), int(match["step"])) for match in matches if match and match["step"]
        }
        wanted = {checkpoint for checkpoint in within_epochs if checkpoint.age in keep_models} - {newest}
        kept = {each for each in wanted if any(each.model_file_as(suffix).name in names for suffix in self.model_suffixes)}
        self.remove(within_epochs - kept - {newest})  # also incomplete ones without a model, which a kill left behind
        for checkpoint in kept:
            self._remove_all_but_model(checkpoint, names)
        finished = dict.fromkeys(checkpoint.epoch for checkpoint in self._complete_checkpoints(names) if checkpoint.step is None)
        with_optimizer = [
            self.checkpoint_at(epoch) for epoch in finished if self.checkpoint_at(epoch).optimizer_file.name in names
        ]
        for checkpoint in with_optimizer[:-KEEP_OPTIMIZERS]:
            if not _is_from_returnn(checkpoint.optimizer_file):
                self._remove_all_but_model(checkpoint, names)

    def _abandon(self, checkpoints: Iterable[Checkpoint], names: Collection[str]) -> None:
        """Remove all but the models of checkpoints. On the disk, these get another name: it may have been a mistake."""
        for checkpoint in checkpoints:
            files = [checkpoint.model_file_as(suffix) for suffix in self.model_suffixes]
            for file in (*files, *(self.folder / name for name in self._model_parts_of(checkpoint, names))):
                with suppress(FileNotFoundError):
                    os.replace(file, f"{file}{ABANDONED}")
            self._remove_all_but_model(checkpoint, names)

    def remove(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Remove checkpoints, each starting with its model, so that after a kill none looks complete."""
        to_remove = list(checkpoints)
        names = self._names() if to_remove else []
        for checkpoint in to_remove:
            for suffix in self.model_suffixes:
                self._remove(checkpoint.model_file_as(suffix))
            self._remove(checkpoint.running_file)
            for name in self._model_parts_of(checkpoint, names):
                self._remove(self.folder / name)
            self._remove_all_but_model(checkpoint, names)

    def _remove_all_but_model(self, checkpoint: Checkpoint, names: Collection[str]) -> None:
        """Remove what only a training needs that continues from a checkpoint. An average needs the running sums, too.

        Args:
            names: those of all files, here and in the mirror.
        """
        for name in names:
            if checkpoint.is_part(name):
                self._remove(self.folder / name)

    def _model_parts_of(self, checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
        """Those of some files that belong to a checkpoint's model, besides the file with its suffix."""
        start = f"{checkpoint.start.name}."
        parts = [name for name in names if self._model_parts and name.startswith(start)]
        return [name for name in parts if re.fullmatch(self._model_parts, name.removeprefix(start))]

    def other_files(self, checkpoint: Checkpoint, names: Collection[str]) -> list[str]:
        """Those of some files that belong to a checkpoint, besides its model's file."""
        return [*(name for name in names if checkpoint.is_part(name)), *self.files_for_averages(checkpoint, names)]

    def files_for_averages(self, checkpoint: Checkpoint, names: Collection[str]) -> list[str]:
        """Those of some files that an average of this checkpoint needs, besides the model's file."""
        running = checkpoint.running_file.name
        return [*([running] if running in names else []), *self._model_parts_of(checkpoint, names)]

    def copy_to_mirror(self, *files: Path) -> None:
        """Copy files to the mirror, if there is one, one after the other. Raises: CheckpointError."""
        if self._mirror is not None:
            for file in files:
                self._mirror.upload(file)

    def _remove(self, file: Path) -> None:
        """Remove a file, if it is there, also from the mirror. Raises: OSError, CheckpointError."""
        file.unlink(missing_ok=True)
        if self._mirror is not None:
            self._mirror.remove(file.name)

    def _names_here(self) -> list[str]:
        return [path.name for path in self._files()]

    def _names(self) -> list[str]:
        """The names of all files, here and in the mirror. Raises: CheckpointError."""
        names = self._names_here()
        return names if self._mirror is None else list(dict.fromkeys([*names, *self._mirror.names()]))

    def newest_of(self, names: Collection[str]) -> Checkpoint | None:
        """The newest checkpoint among files of another folder that training can continue from."""
        complete = self._complete_checkpoints(names)
        return next((checkpoint for checkpoint in reversed(complete) if checkpoint.optimizer_file.name in names), None)

    def _complete_checkpoints(self, names: Iterable[str] | None = None) -> list[Checkpoint]:
        """Every complete checkpoint, oldest first: on disk, or among files of another folder."""
        names = self._names_here() if names is None else names
        matches = [self._pattern.fullmatch(name) for name in names]
        models = [match for match in matches if match and match["model"]]
        complete = [
            self._checkpoint(int(match["epoch"]), step, match["model"], bool(match.groupdict().get("pretrain")))
            for match in models
            for step in [int(match["step"]) if match["step"] else None]
        ]
        suffixes = self.model_suffixes[::-1]  # of a model in several formats, `checkpoint_at` and `newest` find the same
        return sorted(
            complete, key=lambda checkpoint: (checkpoint.age, suffixes.index(checkpoint.model_suffix or checkpoint.suffix))
        )

    def _remove_unfinished(self) -> None:
        """Remove the unfinished files that a killed run left behind."""
        for path in self._files():
            if path.name.startswith(f"{self.prefix.name}.") and path.name.endswith(UNFINISHED):
                remove_path(path)

    def _files(self) -> list[Path]:
        folder = self.prefix.parent
        return list(folder.iterdir()) if folder.is_dir() else []


def folder_of(
    framework: Framework, prefix: Path, model_suffix: str | None = None, mirror: MirrorProtocol | None = None
) -> CheckpointFolder:
    """The checkpoints of a framework that share a prefix.

    Args:
        model_suffix: the suffix of models to write; None: the framework's.
        mirror: where all files are copied to, and removed from.
    """
    suffix = model_suffix or framework.model_suffix
    return CheckpointFolder(prefix, framework.suffix, suffix, framework.model_parts, framework.model_marker, mirror)


def _is_from_returnn(optimizer_file: Path) -> bool:
    """Whether RETURNN wrote a PyTorch file: its version is in the archive's pickle."""
    try:
        with zipfile.ZipFile(optimizer_file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return any(b"returnn_version" in archive.read(name) for name in names)
    except (OSError, zipfile.BadZipFile):
        return False
