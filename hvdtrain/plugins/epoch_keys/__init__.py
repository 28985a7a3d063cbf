"""Keys that change with the epoch (`keys_of_epoch`, or what a framework's model asks for)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    keys={"keys_of_epoch": f"{__name__}.keys:PerEpochKeys"}, epochs={"keys_of_epoch": f"{__name__}.changing:open_changing"}
)
