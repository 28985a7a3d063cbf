"""Restarts by torchrun: an error is not repeated."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(launchers={"restarting_torchrun": f"{__name__}.launcher:RestartingTorchrun"})
