"""The tasks forward and search: a trained model's outputs, sequence by sequence, go into files or to a callback."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    tasks=dict.fromkeys(("forward", "search"), f"{__name__}.task:forward_all"),
    keys={"forward": f"{__name__}.keys:ForwardKeys"},
    needs={"hdf_tools": "output_file"},
)
