"""How steps of PyTorch's compute: compiled, in less memory, with BatchNorm over all ranks, without some parameters at first."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    learner_extensions={"compute": f"{__name__}.extension:computed_as"}, keys={"compute": f"{__name__}.keys:ComputeKeys"}
)
