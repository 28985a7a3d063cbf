"""A LightningModule, and a LightningDataModule, as they are: the keys `lightning_module` and `datamodule` (docs/lightning.md)."""

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key, not_negative
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class LightningKeys(Section):
    """A LightningModule that is trained as it is: get_model, train_step, the optimizer, its rates and the data follow from it."""

    lightning_module: Any = key(
        None,
        "a LightningModule, its class, a function that makes it, 'file.py:Class' or the .yaml of "
        "a LightningCLI; None: the config has get_model itself",
    )
    datamodule: Any = key(
        None,
        "a LightningDataModule, its class, a function that makes it, or 'file.py:Class'; None: the module has its own loaders",
    )
    lightning_callbacks: list[Any] = key([], "Lightning's Callbacks, whose on_... methods are called as by its Trainer")
    lightning_trainer: dict[str, Any] = key(
        {}, "arguments of Lightning's Trainer, which become our keys; those that hvdtrain does not serve are refused"
    )
    num_val_loaders: int | None = key(
        None,
        "how many loaders val_dataloader returns: dev, and val1, val2, ...; None: 1 where there is a validation_step, else 0",
        not_negative,
    )
    save_ckpt: bool = key(
        False, "beside each model, write NAME.ckpt, which load_from_checkpoint reads, with the optimizer and the hyperparameters"
    )


PLUGIN = Plugin(
    keys={"lightning": LightningKeys},
    configs={"lightning_module": f"{__name__}.config:keys_of"},
    templates={
        "lightning": ("a LightningModule, with its loaders and its optimizer", __name__, "pip install lightning torchmetrics")
    },
    needs={"other_trainer": "models", "loaders": "DataLoaders"},
)
