"""With Accelerate: accelerate launch --cpu --num_processes 2 benchmarks/peers/with_accelerate.py (or torchrun)"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from spelling import BATCH, DEV, EPOCHS, FOLDER, SAVE_STEPS, TRAIN, NextLetter, Words, padded
from torch.utils.data import DataLoader

project = ProjectConfiguration(project_dir=FOLDER, automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project)
model = NextLetter()
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
train = DataLoader(Words(TRAIN), BATCH, collate_fn=padded)
dev = DataLoader(Words(DEV), BATCH, collate_fn=padded)
model, optimizer, train, dev = accelerator.prepare(model, optimizer, train, dev)


class Position:
    """What else a checkpoint has to say: the epoch, and the batches done in it."""

    epoch, done = 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


position = Position()
accelerator.register_for_checkpointing(position)
saved = sorted(Path(FOLDER, "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.partition("_")[2]))
if saved:
    accelerator.load_state(str(saved[-1]))
    project.iteration = int(saved[-1].name.partition("_")[2]) + 1
while position.epoch <= EPOCHS:
    model.train()
    for letters, seq_lens in accelerator.skip_first_batches(train, position.done) if position.done else train:
        optimizer.zero_grad()
        accelerator.backward(model(letters, seq_lens).mean())
        optimizer.step()
        position.done += 1
        if SAVE_STEPS and position.done % SAVE_STEPS == 0:
            accelerator.save_state()
    position.epoch, position.done = position.epoch + 1, 0
    accelerator.save_state()
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for letters, seq_lens in dev:
            losses = model(letters, seq_lens).split((seq_lens - 1).tolist())
            sums = torch.stack([word.sum() for word in losses])
            sums, counts = accelerator.gather_for_metrics((sums, seq_lens - 1))
            total += torch.tensor([sums.sum(), counts.sum()])
    accelerator.print(f"epoch {position.epoch - 1}: dev_ce {total[0] / total[1]:.6f}")
accelerator.end_training()
