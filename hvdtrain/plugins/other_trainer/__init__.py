"""`hvdtrain.OtherTrainer`: what plug-ins for the models of other trainers have in common; and what these call our keys."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    names={"OtherTrainer": f"{__name__}.trainer:OtherTrainer"}, synonyms={"trainers": f"{__name__}.synonyms:SYNONYMS"}
)
