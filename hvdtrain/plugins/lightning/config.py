"""The keys that follow from a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.plugins.lightning.arguments import KEY, keys_of_arguments, keys_of_cli
from hvdtrain.plugins.lightning.job import CLIPPING, Job
from hvdtrain.plugins.other_trainer.trainer import refuse_keys

OURS = {
    "get_model": "lightning_module is the model",
    "train_step": "training_step is",
    "optimizer": "configure_optimizers makes it",
    **dict.fromkeys(
        ("learning_rate", "learning_rates", "learning_rate_schedule", "dynamic_learning_rate", "horovod_scale_lr"),
        "configure_optimizers decides on it",
    ),
}
"""Keys that a config with a module does not have, and why."""


def keys_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from `lightning_module`. Raises: ConfigError."""
    refuse_keys("lightning_module", values, OURS)
    keys = keys_of_arguments(values.get(KEY) or {})
    config = {name: value for name, value in values.items() if value is not None}
    module = config["lightning_module"]
    if isinstance(module, str) and module.endswith((".yaml", ".yml")):
        keys = keys_of_cli(Path(module)) | keys
        del config["lightning_module"]
    job = Job(keys | config)
    if CLIPPING in job.user.methods:  # it gets the value as an argument
        keys = {name: value for name, value in keys.items() if not name.startswith("gradient_clip")}
    return keys | job.user.best(job.loaders.num_val) | job.keys() | job.loaders.keys()
