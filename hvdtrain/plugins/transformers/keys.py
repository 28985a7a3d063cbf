"""The key of the plug-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class TrainerKeys(Section):
    """A model of transformers, as it is (docs/transformers.md)."""

    transformers_trainer: dict[str, Any] | None = key(
        None,
        "a dict with arguments of transformers' Trainer: model or model_init, args (TrainingArguments, or a dict of them), "
        "data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, compute_loss_func",
    )
