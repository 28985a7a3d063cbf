"""Tasks that try a config and write nothing: the dry run with the prediction of speed on other numbers of ranks, and the searches
for a batch size and for a learning rate."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    tasks={name: f"{__name__}.{name}:{name}" for name in ("dry_run", "find_batch_size", "find_learning_rate")},
    keys={"trial": f"{__name__}.keys:TrialKeys"},
)
