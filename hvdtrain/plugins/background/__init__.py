"""Checkpoints that another process writes, while training goes on."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(savers={"torch": f"{__name__}.writer:open_writer"}, needs={"local_ranks": "forks"})
