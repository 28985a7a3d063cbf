"""A LightningModule, and a LightningDataModule, as they are: the keys `lightning_module` and `datamodule` (docs/lightning.md)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    keys={"lightning": f"{__name__}.keys:LightningKeys"},
    configs={"lightning_module": f"{__name__}.config:keys_of"},
    templates={
        "lightning": ("a LightningModule, with its loaders and its optimizer", __name__, "pip install lightning torchmetrics")
    },
    needs={"other_trainer": "models", "loaders": "DataLoaders"},
)
