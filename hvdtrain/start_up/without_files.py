"""The settings of a job that writes no files."""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.runtime.log import SCREEN
from hvdtrain.settings import Settings


def writing_nothing(settings: Settings) -> Settings:
    """The settings without the keys by which a training writes files before or within an epoch."""
    return replace(
        settings,
        log=replace(settings.log, log=None, log_verbosity=settings.log.targets[SCREEN]),
        reduce=replace(settings.reduce, horovod_timeline=None),
        saving=replace(settings.saving, save_interval_steps=None, save_interval_minutes=None, checkpoint_mirror=None),
        evaluation=replace(settings.evaluation, eval_interval_steps=None, eval_interval_minutes=None),
    )
