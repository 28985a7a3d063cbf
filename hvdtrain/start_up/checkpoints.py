"""Where the checkpoints of a job are, in the folder of the key `model` and on object storage; and what plug-ins do with them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from hvdtrain.checkpoint.folder import CheckpointFolder, MirrorProtocol, folder_of
from hvdtrain.checkpoint.hooks import CheckpointHooks
from hvdtrain.comm.base import Communicator
from hvdtrain.config.plugins import Registry
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.settings import Settings

CHECKPOINT_HOOKS: Registry[Callable[[Settings], CheckpointHooks | None]] = Registry("checkpoint_hooks")
"""Those of plug-ins."""


def checkpoint_hooks_of(settings: Settings) -> list[CheckpointHooks]:
    """What plug-ins do with the model and the checkpoints of a job."""
    return [hooks for make in CHECKPOINT_HOOKS.values() if (hooks := make(settings)) is not None]


def checkpoint_folder(settings: Settings) -> CheckpointFolder:
    framework = FRAMEWORKS[settings.run.backend]
    return folder_of(framework, Path(settings.run.model), settings.saving.checkpoint_format, mirror_of(settings))


def fetch_needed_models(
    settings: Settings,
    comm: Communicator,
    checkpoints: CheckpointFolder,
    needed: Callable[[Collection[tuple[int, float]]], Collection[tuple[int, float]]],
) -> None:
    """Collective. Fetch from `checkpoint_mirror` what plug-ins need, and the best model within an epoch."""
    mirror = mirror_of(settings)
    if mirror is not None:
        mirror.fetch_models(comm, checkpoints, needed)


MIRRORS: Registry[Callable[[str], MirrorProtocol]] = Registry("mirrors")
"""Those of plug-ins, given a URL; the last one is used."""


def mirror_of(settings: Settings) -> MirrorProtocol | None:
    """Where the training's checkpoints are copied to."""
    url = settings.saving.checkpoint_mirror
    open_mirror = None if url is None else MIRRORS.last  # the key's check has refused a URL where there is none
    return None if url is None or open_mirror is None else open_mirror(url)
