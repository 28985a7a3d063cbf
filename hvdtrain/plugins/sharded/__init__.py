"""Optimizers whose state is divided among the ranks (`sharded` of torch_distributed)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    learner_extensions={"sharded": f"{__name__}.optimizer:sharded_over"}, keys={"sharded": f"{__name__}.keys:ShardingKeys"}
)
