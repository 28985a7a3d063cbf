"""A config whose batches a `collate` function makes of items of any kind, and the same for a loop of one's own."""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
import os
import signal
from typing import NamedTuple

import numpy
import torch
from torch import nn

import hvdtrain


class Pair(NamedTuple):
    words: torch.Tensor
    label: int


class Pairs(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        words = torch.from_numpy(numpy.random.default_rng(index).integers(1, 20, 3 + index % 7))
        noise = torch.rand(1) if drawing == "items" else torch.zeros(1)
        return {"pair": Pair(words, int(words.sum()) % 3), "noise": noise, "name": f"pair {index}"}


class Unreadable(Pairs):
    """Some of its items are None, which `collate` leaves out."""

    def __getitem__(self, index):
        return None if index % 6 == 1 else super().__getitem__(index)


class Backwards(torch.utils.data.Sampler):
    """Draws nothing, and has each item once."""

    def __len__(self):
        return 50

    def __iter__(self):
        return iter(range(49, -1, -1))


def collate(items):
    items = [item for item in items if item is not None]
    pairs = [item.pop("pair") for item in items]
    words = nn.utils.rnn.pad_sequence([pair.words for pair in pairs], batch_first=True)
    shift = torch.rand(1) if drawing == "collate" else torch.zeros(1)
    return {
        "input": [words, words > 0],
        "labels": torch.tensor([pair.label for pair in pairs]),
        "noise": torch.stack([item["noise"] for item in items]) + shift,
        "names": [item["name"] for item in items],
    }


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.output = nn.Linear(8, 3)

    def forward(self, batch):
        words, mask = batch["input"]
        mean = (self.embedding(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.output(mean + batch["noise"])


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch), batch["labels"])


def get_model(**_):
    torch.manual_seed(3)
    return Classifier()


def train_step(*, model, extern_data, **_):
    if len(extern_data["labels"]) > fitting and hvdtrain.get_run_ctx().train_flag:
        raise torch.OutOfMemoryError("out of memory")
    hvdtrain.get_run_ctx().mark_as_loss(loss_of(model, extern_data), "ce")
    if hvdtrain.get_run_ctx().step == stop_at and hvdtrain.get_run_ctx().train_flag:
        os.kill(os.getpid(), signal.SIGTERM)


def forward_step(*, model, extern_data, **_):
    assert len(extern_data["names"]) == len(extern_data["labels"])
    hvdtrain.get_run_ctx().mark_as_output(model(extern_data), "scores")


try:
    drawing, stop_at, reading = config.value("drawing", ""), config.int("stop_at", -1), config.value("reading", "dict")
    fitting = config.int("fitting", 50)
except NameError:  # imported by a test
    drawing, stop_at, reading, fitting = "", -1, "dict", 50

LOADERS = {
    "loader": lambda: torch.utils.data.DataLoader(Pairs(50), batch_size=12 // hvdtrain.size(), collate_fn=collate),
    "unreadable": lambda: torch.utils.data.DataLoader(Unreadable(50), batch_size=12 // hvdtrain.size(), collate_fn=collate),
    "sampler": lambda: torch.utils.data.DataLoader(
        Pairs(50), sampler=Backwards(), batch_size=12 // hvdtrain.size(), collate_fn=collate
    ),
    "batches": lambda: torch.utils.data.DataLoader(
        Pairs(50),
        batch_sampler=[each.tolist() for each in torch.arange(50).split(12 // hvdtrain.size())],
        collate_fn=collate,
    ),
    "workers": lambda: torch.utils.data.DataLoader(Pairs(50), batch_size=12, collate_fn=collate, num_workers=2),
}
train = {"class": Pairs, "count": 50, "collate": collate}
dev = {"class": Pairs, "count": 20, "collate": collate}
if reading == "concat":
    both = [{"class": torch.utils.data.Subset(Pairs(50), part), "collate": collate} for part in (range(20), range(20, 50))]
    train = {"class": "ConcatDataset", "datasets": both}
elif reading in LOADERS:
    train, dev = LOADERS[reading](), torch.utils.data.DataLoader(Pairs(20), batch_size=8, collate_fn=collate)
if reading not in LOADERS:
    max_seqs = 12 // hvdtrain.size()
forward_data = dev
num_epochs = 2
num_threads = 1
learning_rate = 0.5
optimizer = {"class": "sgd"}
log_interval = 0
