"""A perceptron and an acoustic-like model, with batches with and without padding. Used by benchmarks/packing/compare.py."""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
import json
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional

import hvdtrain

sys.path.append(str(Path(__file__).resolve().parent.parent / "acoustic"))

import acoustic_model  # noqa: E402  # found through the line above
from acoustic_model import CLASSES, FEATURES  # noqa: E402

of = config.value("of", "perceptron")
packed = config.bool("packed", False)
generator = numpy.random.default_rng(1)
frames = numpy.exp(generator.normal(5.1, config.float("spread", 0.22), config.int("sequences", 320))).astype(int) + 4


def sequence(length):
    labels = length if of == "perceptron" else max(1, length // 12)
    return generator.normal(size=(length, FEATURES)).astype("float32"), generator.integers(0, CLASSES, labels).astype("int64")


train = [sequence(length) for length in frames]
batching = "random"
max_seqs = 32
num_epochs = 2
num_threads = 1
learning_rate = 0.001
log_verbosity = 4


class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))

    def packed(self, data):
        return data.with_values(self(data.raw_tensor))


class Acoustic(acoustic_model.Acoustic):
    """That of benchmarks/acoustic, also without padding."""

    def packed(self, data):
        for layer in (self.first, self.second):
            data = data.conv1d(layer)
            data = data.with_values(functional.relu(data.raw_tensor), data.seq_lens)
        return data.with_values(self.output(data.recurrent(self.recurrent)))


def get_model(**_):
    torch.manual_seed(1)
    return Perceptron() if of == "perceptron" else Acoustic()


steps = []
"""The CPU seconds of this process when each step begins, and the frames of its batch."""


def train_step(*, model, extern_data, **_):
    data, classes = extern_data["data"], extern_data["classes"]
    steps.append((time.process_time(), int(data.seq_lens.sum())))
    if of == "perceptron":
        scores = model(data.raw_tensor)
        scores, targets = (scores, classes.raw_tensor) if packed else (scores[data.mask], classes.raw_tensor[classes.mask])
        losses = functional.cross_entropy(scores, targets, reduction="none")
    else:
        if packed:
            made = model.packed(data)
            scores, lengths, targets = made.padded(), made.seq_lens, classes.raw_tensor
        else:
            scores, lengths, targets = model(data.raw_tensor), (data.seq_lens + 3) // 4, classes.raw_tensor[classes.mask]
        losses = functional.ctc_loss(
            scores.log_softmax(-1).transpose(0, 1), targets, lengths, classes.seq_lens, CLASSES, "none", zero_infinity=True
        )
    hvdtrain.get_run_ctx().mark_as_loss(losses, of, use_normalized_loss=True)


def epoch_end(**_):
    (first, _), *rest, (last, _) = steps
    Path(config.value("result")).write_text(json.dumps([sum(number for _, number in steps[:-1]), last - first]))
    steps.clear()
