"""Scores of a whole dataset that are no means, such as BLEU: functions of sums, and metrics of torchmetrics (`epoch_scores`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(scorings={"scores": f"{__name__}.functions:open_scoring"}, keys={"scores": f"{__name__}.keys:EpochScoreKeys"})
