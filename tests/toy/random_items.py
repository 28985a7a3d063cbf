"""A config whose items draw random numbers, from the generators named in `draws`; and a model with dropout."""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
import json
import os
import random
import signal
import time

import numpy
import torch
from torch import nn

import hvdtrain

GENERATORS = {
    "numpy": lambda: numpy.random.rand(),
    "torch": lambda: float(torch.rand(1)),
    "random": lambda: random.random(),
    "gauss": lambda: random.gauss(0, 1) + numpy.random.randn(),
}
HELD = [numpy.random.default_rng(1), numpy.random.RandomState(1), random.Random(1), torch.Generator()]
draws = config.value("draws", "")
drawing = config.int("only_at", -1)
around = config.value("around", "items")
record = config.value("record")


def noise(index):
    if "held" in draws:
        return HELD[0].random() + HELD[1].rand() + HELD[2].random() + float(torch.rand(1, generator=HELD[3]))
    return sum(GENERATORS[name]() for name in draws.split(",") if name and drawing in (index, -1))


class Items:
    dims = {"classes": 5}

    def __init__(self, count):
        self.frames = [numpy.full((3 + number % 5, 4), number / count, numpy.float32) for number in range(count)]

    def __len__(self):
        return len(self.frames)

    def lengths(self):
        return {"data": [len(frames) for frames in self.frames]}

    def __getitem__(self, index):
        data = self.frames[index] + numpy.float32(0 if around != "items" else noise(index))
        return {"data": data, "classes": index % 5, "number": index}


def with_noise(arrays):
    return {**arrays, "data": arrays["data"] + numpy.float32(noise(int(arrays["number"][0])))}


def iterate():
    for index in range(40):
        item = Items(40)[index]
        yield item if around == "mapped iterable" else {**item, "data": item["data"] + numpy.float32(noise(index))}


train = {"class": Items, "count": 40}
if around in ("map", "workers", "mapped iterable"):
    train = {"class": "MapDataset", "dataset": train, "map_seq": with_noise, "num_workers": 2 if around == "workers" else 0}
if around == "mapped iterable":
    train["dataset"] = {"class": "IterableDataset", "iterable": iterate, "window": 10}
if around == "iterable":
    train = {"class": "IterableDataset", "iterable": iterate, "window": 10}
train["seq_ordering"] = "random"
dev = {"class": Items, "count": 12}
num_epochs = 2
max_seqs = 4 // hvdtrain.size()
num_threads = 1
log_verbosity = 5
log_interval = 0
learning_rate = 0.05
lengths_dir = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 5)

    def forward(self, frames):
        return self.last(self.dropout(self.first(frames).relu()))


def get_model(**_):
    return Net()


def train_step(*, model, extern_data, **_):
    context, data = hvdtrain.get_run_ctx(), extern_data["data"]
    if context.train_flag:
        own = [draw() for draw in GENERATORS.values()] if config.bool("draws_too", False) else []
        note(context.epoch, extern_data["number"].raw_tensor[:, 0].tolist(), data.raw_tensor[:, 0, 0].tolist(), own)
    scores = model(data.raw_tensor).mean(1)
    entropies = nn.functional.cross_entropy(scores, extern_data["classes"].raw_tensor[:, 0].long(), reduction="none")
    context.mark_as_loss(entropies, "ce")


def note(epoch, numbers, values, own):
    if record:
        time.sleep(0.001)
        with open(f"{record}.{hvdtrain.rank()}", "a") as file:
            file.writelines(json.dumps([epoch, number, value, own]) + "\n" for number, value in zip(numbers, values, strict=True))


class Stops:
    def on_step_end(self, training):
        if training.rank == 0 and training.step == config.int("stop_at", -1):
            os.kill(os.getpid(), signal.SIGTERM)


callbacks = Stops
