"""A LightningModule, and a training of it with Lightning's own Trainer."""

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.demos import boring_classes as demos  # noqa: E402
from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402
from torchmetrics import MeanSquaredError  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    """Two groups, schedulers of steps and of epochs, metrics of training and of evaluation, and further state."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.items, self.others = demos.RandomDataset(32, 50), demos.RandomDataset(32, 22)
        self.net = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))
        self.mse, self.train_mse = MeanSquaredError(), MeanSquaredError()
        self.steps = 0
        self.rates: list[list[float]] = []

    def losses(self, batch: torch.Tensor) -> Any:
        found, wanted = self.net(batch), batch[:, :2] / 2
        return torch.nn.functional.mse_loss(found, wanted), found, wanted

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss, found, wanted = self.losses(batch)
        self.steps += 1
        self.rates.append([group["lr"] for group in self.optimizers().param_groups])
        self.train_mse(found, wanted)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_mse", self.train_mse, on_step=False, on_epoch=True)
        return {"loss": loss, "more": found}

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss, found, wanted = self.losses(batch)
        self.mse(found, wanted)
        self.log_dict({"val_loss": loss, "val_mse": self.mse})
        self.log("most", found.max(), reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        self.log("again", self.mse.compute())

    def configure_optimizers(self) -> Any:
        first, last = ({"params": one.parameters(), "lr": lr} for one, lr in ((self.net[0], 0.01), (self.net[2], 0.003)))
        optimizer = torch.optim.AdamW([first, last])
        total = self.trainer.estimated_stepping_batches
        step = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=total)
        epoch = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return [optimizer], [{"scheduler": step, "interval": "step"}, {"scheduler": epoch, "monitor": "val_loss"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["steps"] = self.steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps = checkpoint["steps"]

    def train_dataloader(self) -> Any:
        return DataLoader(self.items, batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(self.others, batch_size=4)

    test_dataloader, test_step = val_dataloader, validation_step


def fit(module: Any, epochs: int = 2, datamodule: Any = None, **more: Any) -> Any:
    """Train with Lightning's Trainer."""
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    here = [LightningEnvironment()]  # else it looks for MPI, which starts a process
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", num_sanity_val_steps=0, plugins=here, **{**quiet, **more})
    trainer.fit(module, datamodule=datamodule)
    return trainer
