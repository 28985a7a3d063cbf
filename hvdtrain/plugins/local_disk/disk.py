"""Checkpoints on a local disk first, which are copied to the model's folder while training goes on: `checkpoint_local`.

The disk holds one checkpoint, until it is in the model's folder. Once it is complete, a note with a random id says so, on the
disk and next to the model. A checkpoint on the disk counts only if both notes are the same: what an earlier training of this name
has left, or one that has gone on elsewhere, is never taken for the newest checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import CheckpointFolder, ContentsProtocol, folder_of
from hvdtrain.checkpoint.hooks import Age, CheckpointHooks
from hvdtrain.comm.base import Communicator, on_rank_zero
from hvdtrain.disk.atomic import atomically, flush_to_disk, write_atomically
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.learner.integrity import new_save_id
from hvdtrain.plugins.local_disk.keys import LocalDiskKeys
from hvdtrain.runtime import log
from hvdtrain.settings import Settings


@dataclass(frozen=True)
class FilesOnDisk:
    """The files of a checkpoint on the disk, of which one in the model's folder is made.

    Attributes:
        parts: those that belong to the model, besides the file with its suffix.
    """

    checkpoint: Checkpoint
    parts: Sequence[Path]

    def write(self, model_file: Path, optimizer_file: Path) -> None:
        """Copy the files of the model and the optimizer. Raises: OSError."""
        _copy(self.checkpoint.optimizer_file, optimizer_file)
        for file in self.parts:
            with atomically(model_file.with_name(file.name)) as unfinished:
                _copy(file, unfinished)
        _copy(self.checkpoint.model_file, model_file)

    def write_running(self, file: Path) -> bool:
        """Copy the sums of a running average, and return True; False: there are none. Raises: OSError."""
        if not self.checkpoint.running_file.exists():
            return False
        _copy(self.checkpoint.running_file, file)
        return True


class LocalPlace(CheckpointHooks):
    """Writes checkpoints to the local disk of a config first. Fetches what an earlier start has left on one, also without it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def disk(self, checkpoints: CheckpointFolder) -> LocalDisk | None:
        settings = self._settings
        place = settings.of(LocalDiskKeys).checkpoint_local
        if place is None:
            return None
        prefix = local_prefix(place, Path(settings.run.model))
        disk = folder_of(FRAMEWORKS[settings.run.backend], prefix, settings.saving.checkpoint_format)
        return LocalDisk(disk, checkpoints, is_awaited=not settings.saving.save_in_background)

    def fetch(self, comm: Communicator, checkpoints: CheckpointFolder) -> None:
        copy_newest(comm, checkpoints, self.disk(checkpoints))


class LocalDisk:
    """The newest checkpoint of a training, on a local disk.

    Args:
        disk: in a folder that nothing else uses.
        checkpoints: in the model's folder.

    Attributes:
        is_awaited: whether the steps wait until a checkpoint is on the disk; otherwise they wait for a copy in memory only.
    """

    def __init__(self, disk: CheckpointFolder, checkpoints: CheckpointFolder, is_awaited: bool) -> None:
        self._disk = disk
        self._checkpoints = checkpoints
        self.is_awaited = is_awaited

    def write(self, target: Checkpoint, contents: ContentsProtocol) -> FilesOnDisk:
        """Write a checkpoint to the disk, in place of the one before. Raises: CheckpointError."""
        copy = self._local_copy(target)
        self._clear()
        self._disk.put(copy, contents)
        host = socket.gethostname()
        folder = str(self._disk.folder)
        text = json.dumps({"model": copy.model_file.name, "id": new_save_id(), "host": host, "folder": folder})
        for note in (self._disk.note, self._checkpoints.note):
            _write(note, text)
        return self._files(copy)

    def copy(self, target: Checkpoint, contents: ContentsProtocol, keep_models: Collection[Age]) -> None:
        """Copy a checkpoint to the model's folder, as `CheckpointFolder.write` writes one. Raises: CheckpointError.

        Args:
            contents: what `write` returned; or something else, which is written to the disk before.
        """
        files = contents if isinstance(contents, FilesOnDisk) else self.write(target, contents)
        try:
            self._checkpoints.write(target, files, keep_models)
        except CheckpointError as error:
            whole = f"{files.checkpoint.model_file} on {socket.gethostname()} is whole, and the next start there copies it"
            raise CheckpointError(f"checkpoint_local: {error} ({whole})") from error
        self._clear()

    def restore(self, target: Checkpoint) -> bool:
        """Copy the checkpoint that the note next to the model names to there; False: the disk does not have it.

        Raises:
            CheckpointError: it cannot be copied.
        """
        copy = self._local_copy(target)
        if _read(self._disk.note) != _read(self._checkpoints.note) or not copy.model_file.exists():
            return False
        self._checkpoints.put(target, self._files(copy))  # removes nothing: what it supersedes is removed by the next save
        self._clear()
        return True

    def _local_copy(self, target: Checkpoint) -> Checkpoint:
        return replace(target, start=self._disk.folder / target.start.name)

    def _files(self, copy: Checkpoint) -> FilesOnDisk:
        names = [path.name for path in self._disk.folder.iterdir()]
        parts = set(self._disk.files_for_averages(copy, names)) - {copy.running_file.name}
        return FilesOnDisk(copy, [self._disk.folder / name for name in sorted(parts)])

    def _clear(self) -> None:
        shutil.rmtree(self._disk.folder, ignore_errors=True)


def local_prefix(place: str, prefix: Path) -> Path:
    """Where on a disk the checkpoints of a training are: in a folder that depends on the whole path of its model."""
    digest = hashlib.sha256(os.fsencode(prefix.absolute())).hexdigest()[:16]
    return Path(place) / f"{digest}-{prefix.absolute().parent.name}" / prefix.name


def copy_newest(comm: Communicator, checkpoints: CheckpointFolder, local: LocalDisk | None) -> None:
    """Collective. If the newest checkpoint is on the local disk of rank 0, copy it to the model's folder.

    Raises:
        CheckpointError: it cannot be copied.
    """

    def copy() -> None:
        about = _parse(_read(checkpoints.note))
        newest = checkpoints.newest()
        noted = checkpoints.models([about.get("model", "")])
        if not noted or (newest is not None and newest.age >= noted[0].age):
            return
        where = f"{about.get('folder')} on {about.get('host')}"
        if local is not None and local.restore(noted[0]):
            log.info(f"Copied {noted[0].model_file} and its other files from {where} (checkpoint_local).")
        else:
            log.warning(
                f"{checkpoints.note}: expected the checkpoint {noted[0].describe()} from {where}, got none here: training "
                f"{'begins anew' if newest is None else f'continues {newest.describe()}'} (to continue from that one, start "
                "rank 0 on that host, with the same checkpoint_local)"
            )

    on_rank_zero(comm, copy, name="local_checkpoint")


def _copy(source: Path, target: Path) -> None:
    """Copy a file, and flush it to the disk. Raises: OSError."""
    about = source.stat()
    shutil.copyfile(source, target)
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
    flush_to_disk(target)


def _write(note: Path, text: str) -> None:
    """Write a note, whole or not at all. Raises: CheckpointError."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, text, flush=True)
    except OSError as error:
        raise CheckpointError(f"{note}: expected to write which checkpoint is on the local disk, got: {error}") from error


def _read(note: Path) -> str:
    """A note; '': there is none."""
    try:
        return note.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _parse(note: str) -> dict[str, str]:
    """What a note says; nothing, if it is damaged."""
    try:
        about = json.loads(note)
    except ValueError:
        return {}
    return about if isinstance(about, dict) and all(isinstance(value, str) for value in about.values()) else {}
