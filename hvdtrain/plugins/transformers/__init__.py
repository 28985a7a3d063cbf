"""Models of transformers train as they are: the arguments of its Trainer are the key `transformers_trainer`."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    keys={"transformers_trainer": f"{__name__}.keys:TrainerKeys"},
    configs={"transformers_trainer": f"{__name__}.trainer:keys_of"},
    templates={
        "transformers": (
            "a model of transformers, with its data collator and the arguments of a Trainer",
            __name__,
            "pip install transformers accelerate",
        )
    },
    names={"SavePretrained": f"{__name__}.pretrained:SavePretrained"},
    needs={"other_trainer": "models", "cleanup": "save_total_limit"},
)
