"""With Lightning: torchrun --nproc_per_node 2 benchmarks/peers/with_lightning.py"""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from spelling import BATCH, DEV, EPOCHS, FOLDER, SAVE_STEPS, TRAIN, WORLD_SIZE, NextLetter, Words, in_order, padded
from torch.utils.data import DataLoader


class LightningWords(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = NextLetter()

    def training_step(self, batch, _):
        losses = self.model(*batch)
        self.log("train_ce", losses.mean(), batch_size=len(losses), on_step=False, on_epoch=True)
        return losses.mean()

    def validation_step(self, batch, _):
        losses = self.model(*batch)
        self.log("dev_ce", losses.mean(), batch_size=len(losses), sync_dist=True)

    def on_validation_epoch_end(self):
        self.print(f"epoch {self.current_epoch + 1}: dev_ce {self.trainer.callback_metrics['dev_ce']:.6f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


every = {"every_n_train_steps": SAVE_STEPS} if SAVE_STEPS else {"every_n_epochs": 1}
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD_SIZE,
    strategy="ddp" if WORLD_SIZE > 1 else "auto",
    max_epochs=EPOCHS,
    callbacks=[ModelCheckpoint(FOLDER, save_last=True, **every)],
    default_root_dir=FOLDER,
    num_sanity_val_steps=0,
)
words = Words(TRAIN)
trainer.fit(
    LightningWords(),
    DataLoader(words, BATCH, collate_fn=padded, sampler=in_order(words)),  # on several ranks, Lightning would shuffle them
    DataLoader(Words(DEV), BATCH, collate_fn=padded),
    ckpt_path="last" if Path(FOLDER, "last.ckpt").exists() else None,
)
