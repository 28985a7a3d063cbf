"""By hand, with DistributedDataParallel: torchrun --nproc_per_node 2 benchmarks/peers/with_ddp.py"""

from pathlib import Path

import torch
from spelling import BATCH, DEV, EPOCHS, FOLDER, SAVE_STEPS, TRAIN, NextLetter, Words, padded
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

distributed.init_process_group("gloo")
rank = distributed.get_rank()
words, dev_words = Words(TRAIN), Words(DEV)
sampler = DistributedSampler(words, shuffle=False)
train = DataLoader(words, BATCH, sampler=sampler, collate_fn=padded)
dev = DataLoader(dev_words, BATCH, sampler=DistributedSampler(dev_words, shuffle=False), collate_fn=padded)
model = DistributedDataParallel(NextLetter())
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

first, done = 1, 0
newest = Path(FOLDER, "newest.pt")
if newest.exists():
    state = torch.load(newest)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first, done = state["epoch"], state["done"]


def save(epoch: int, done: int) -> None:
    if rank == 0:
        newest.parent.mkdir(parents=True, exist_ok=True)
        weights = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**weights, "epoch": epoch, "done": done}, newest.with_suffix(".tmp"))
        newest.with_suffix(".tmp").rename(newest)
    distributed.barrier()


for epoch in range(first, EPOCHS + 1):
    model.train()
    for step, (letters, seq_lens) in enumerate(train, 1):
        if step <= done:
            continue
        optimizer.zero_grad()
        model(letters, seq_lens).mean().backward()
        optimizer.step()
        if SAVE_STEPS and step % SAVE_STEPS == 0:
            save(epoch, step)
    done = 0
    save(epoch + 1, 0)
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for letters, seq_lens in dev:
            losses = model.module(letters, seq_lens)
            total += torch.tensor([losses.sum(), len(losses)])
    distributed.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: dev_ce {total[0] / total[1]:.6f}", flush=True)
distributed.destroy_process_group()
