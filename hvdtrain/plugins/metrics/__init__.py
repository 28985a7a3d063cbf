"""Metrics of torchmetrics as scores of a whole dataset (`epoch_scores`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(learner_extensions={"torchmetrics": f"{__name__}.summed:with_metrics"})
