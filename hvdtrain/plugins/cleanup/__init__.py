"""Removing the models of earlier epochs: the key and the task `cleanup_old_models`."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    tasks={"cleanup_old_models": f"{__name__}.task:clean_up_all"},
    checkpoint_hooks={"cleanup": f"{__name__}.removal:cleanup_of"},
    keys={"cleanup": f"{__name__}.keys:OldModelsKeys"},
)
