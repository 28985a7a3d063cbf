"""Ranks that hvdtrain itself starts on this host (`++ngpu 4`), and starts again after a failure."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(launchers={"ngpu": f"{__name__}.launcher:Ngpu"})
