"""Checkpoints on a local disk first: the key `checkpoint_local`."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    checkpoint_hooks={"local_disk": f"{__name__}.disk:LocalPlace"},
    keys={"local_disk": f"{__name__}.keys:LocalDiskKeys"},
)
