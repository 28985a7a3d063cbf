"""`hvdtrain.OtherTrainer`: what plug-ins for the models of other trainers have in common."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(names={"OtherTrainer": f"{__name__}.trainer:OtherTrainer"})
