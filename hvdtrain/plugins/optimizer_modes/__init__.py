"""Optimizers with `train()` and `eval()`, such as schedule-free ones."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(learner_extensions={"optimizer_modes": f"{__name__}.weights:with_modes"})
