"""Models of transformers train as they are: the arguments of its Trainer are the key `transformers_trainer`."""

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class TrainerKeys(Section):
    """A model of transformers, as it is (docs/transformers.md)."""

    transformers_trainer: dict[str, Any] | None = key(
        None,
        "a dict with arguments of transformers' Trainer: model or model_init, args (TrainingArguments, or a dict of them), "
        "data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, compute_loss_func",
    )


PLUGIN = Plugin(
    keys={"transformers_trainer": TrainerKeys},
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
