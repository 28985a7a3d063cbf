"""A copy of a training's checkpoints on object storage: `checkpoint_mirror`.

The checkpoints on disk come first: a file is uploaded once it has its name there. An object appears when all of it has arrived,
and the model's file is uploaded last and removed first. So a checkpoint in the mirror, too, exists once its model does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.disk.atomic import atomically
from hvdtrain.errors import CheckpointError, DataError
from hvdtrain.plugins.remote.files import RemoteFile, list_names, remove, upload
from hvdtrain.runtime import log

T = TypeVar("T")


class Mirror:
    """A folder on object storage with the files of checkpoints.

    Args:
        url: of the folder.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def names(self) -> list[str]:
        """The files in it. Raises: CheckpointError."""
        return _translate_error(lambda: list_names(self._url))

    def upload(self, file: Path) -> None:
        """Store a file, whole or not at all. Raises: CheckpointError."""
        _translate_error(lambda: upload(file, self._path(file.name)), f" ({file} is written, and can be loaded)")

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises: CheckpointError."""
        _translate_error(lambda: remove(self._path(name)))

    def download(self, name: str, folder: Path) -> None:
        """Fetch a file, whole or not at all. Raises: CheckpointError."""
        file = RemoteFile(self._path(name))

        def fetch() -> None:
            size, version = file.size_and_version()
            with atomically(folder / name, has_peers=True) as unfinished:
                target = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
                try:
                    file.transfer(target, size, version, lambda number: None)
                finally:
                    os.close(target)

        try:
            _translate_error(fetch)
        except OSError as error:
            raise CheckpointError(f"{folder / name}: expected to write a checkpoint, got: {error}") from error

    def _path(self, name: str) -> str:
        return f"{self._url}/{name}"

    def fetch_newest(self, comm: Communicator, checkpoints: CheckpointFolder) -> None:
        """Collective. If the newest checkpoint is in the mirror, fetch it to every host that does not have it.

        Raises:
            CheckpointError: the mirror cannot be read, or a folder cannot be written to.
        """

        def find() -> tuple[Checkpoint | None, list[str]]:
            names = self.names()
            there = checkpoints.newest_of(names)
            here = checkpoints.newest()
            newest = here if there is None or (here is not None and here.age >= there.age) else there
            return newest, names

        newest, names = on_rank_zero(comm, find, name="newest_in_mirror")
        if newest is None or newest.model_file.name not in names:
            return

        def fetch() -> bool:
            if comm.local_rank != 0 or newest.model_file.exists():
                return False
            newest.model_file.parent.mkdir(parents=True, exist_ok=True)
            for name in checkpoints.other_files(newest, names):
                self.download(name, newest.model_file.parent)
            self.download(newest.model_file.name, newest.model_file.parent)
            return True

        if together(comm, fetch, name="fetch_checkpoint"):
            log.info(f"Fetched {newest.model_file} and its other files from checkpoint_mirror.")

    def fetch_models(
        self,
        comm: Communicator,
        checkpoints: CheckpointFolder,
        needed: Callable[[Collection[tuple[int, float]]], Collection[tuple[int, float]]],
    ) -> None:
        """Collective. Fetch to the disk of rank 0 models that only the mirror has, and that the training still needs.

        What is not on the disk counts as lost, and `CheckpointFolder.tidy` removes it from the mirror, too.

        Args:
            needed: given the ages of all models, returns the ages of those.

        Raises:
            CheckpointError: the mirror cannot be read, or the folder cannot be written to.
        """

        def fetch() -> list[str]:
            names = self.names()
            here = {checkpoint.age for checkpoint in checkpoints.models()}
            there = {checkpoint.age: checkpoint for checkpoint in checkpoints.models(names)}
            missing = [there[age] for age in sorted(needed({*here, *there})) if age in there.keys() - here]
            for checkpoint in missing:
                for name in [*checkpoints.files_for_averages(checkpoint, names), checkpoint.model_file.name]:
                    self.download(name, checkpoints.folder)
            return [checkpoint.model_file.name for checkpoint in missing]

        fetched = on_rank_zero(comm, fetch, name="fetch_models")
        if fetched:
            log.info(f"Fetched {', '.join(fetched)} from checkpoint_mirror, for averages or as the best model.")


def _translate_error(call: Callable[[], T], hint: str = "") -> T:
    """The result of a call. Its DataError becomes a CheckpointError."""
    try:
        return call()
    except DataError as error:
        raise CheckpointError(f"checkpoint_mirror: {error}{hint}") from error
