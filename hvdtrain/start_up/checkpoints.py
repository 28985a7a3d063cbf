"""Where the checkpoints of a job are: in the folder of the key `model`, on a local disk, and on object storage."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from hvdtrain.checkpoint.folder import CheckpointFolder, folder_of
from hvdtrain.checkpoint.local import LocalDisk, local_prefix
from hvdtrain.checkpoint.mirror import Mirror, fetch_models
from hvdtrain.comm.base import Communicator
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
        fetch_models(comm, checkpoints, mirror, needed)


def mirror_of(settings: Settings) -> Mirror | None:
    """Where the training's checkpoints are copied to."""
    return None if settings.saving.checkpoint_mirror is None else Mirror(settings.saving.checkpoint_mirror)
