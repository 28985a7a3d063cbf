"""Parameters from other models' files: the key `preload_from_files`."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    checkpoint_hooks={"preload": f"{__name__}.loading:preloading_of"},
    keys={"preload": f"{__name__}.keys:PreloadFilesKeys"},
)
