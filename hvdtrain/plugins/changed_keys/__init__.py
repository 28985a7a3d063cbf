"""Lines in the log about keys whose values differ from those in the checkpoint from which a training continues."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(checkpoint_hooks={"changed keys": f"{__name__}.comparison:ChangedKeys"})
