"""The command prove: checks that a training on N ranks computes the same as one rank from the same global batches."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    commands={"prove": ("show whether training on N ranks computes what one rank computes", f"{__name__}.__main__")},
    needs={"local_ranks": "ranks"},
)
