"""Where the checkpoints of a job are: in the folder of the key `model`, on a local disk, and on object storage."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from hvdtrain.checkpoint.folder import CheckpointFolder, MirrorProtocol, folder_of
from hvdtrain.checkpoint.local import LocalDisk, local_prefix
from hvdtrain.comm.base import Communicator
from hvdtrain.config.plugins import Registry
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.settings import Settings


def checkpoint_folder(settings: Settings) -> CheckpointFolder:
    framework = FRAMEWORKS[settings.run.backend]
    return folder_of(framework, Path(settings.run.model), settings.saving.checkpoint_format, mirror_of(settings))


def local_disk(settings: Settings, checkpoints: CheckpointFolder) -> LocalDisk | None:
    """Where checkpoints are written first, if not to the model's folder."""
    saving = settings.saving
    if saving.checkpoint_local is None:
        return None
    prefix = local_prefix(saving.checkpoint_local, Path(settings.run.model))
    disk = folder_of(FRAMEWORKS[settings.run.backend], prefix, saving.checkpoint_format)
    return LocalDisk(disk, checkpoints, is_awaited=not saving.save_in_background)


def fetch_needed_models(
    settings: Settings,
    comm: Communicator,
    checkpoints: CheckpointFolder,
    needed: Callable[[Collection[tuple[int, float]]], Collection[tuple[int, float]]],
) -> None:
    """Collective. Fetch from `checkpoint_mirror` what averages may need, and the best model within an epoch."""
    mirror = mirror_of(settings)
    if mirror is not None and (settings.saving.average_checkpoints or settings.evaluation.serves("best_model")):
        mirror.fetch_models(comm, checkpoints, needed)


MIRRORS: Registry[Callable[[str], MirrorProtocol]] = Registry("mirrors")
"""Those of plug-ins, given a URL; the last one is used."""


def mirror_of(settings: Settings) -> MirrorProtocol | None:
    """Where the training's checkpoints are copied to."""
    url = settings.saving.checkpoint_mirror
    open_mirror = None if url is None else MIRRORS.last  # the key's check has refused a URL where there is none
    return None if url is None or open_mirror is None else open_mirror(url)
