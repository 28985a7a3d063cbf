"""A Brain of SpeechBrain trains as it is (`brain`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    keys={"brain": f"{__name__}.keys:BrainKeys"},
    configs={"brain": f"{__name__}.brain:keys_of"},
    templates={
        "speechbrain": ("a Brain of SpeechBrain with its hyperparameters", __name__, "pip install speechbrain hyperpyyaml")
    },
    needs={"other_trainer": "models", "loaders": "samplers"},
)
