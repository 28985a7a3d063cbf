"""The command average: one model from several checkpoints of a training."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(commands={"average": ("write the mean of several checkpoints of a training", f"{__name__}.__main__")})
