"""A config as it was with hvdtrain 0.1.0, and later ones, whose checkpoints are in the folders beside it. It stays as it is."""

import numpy
import torch
from torch import nn

import hvdtrain

random = numpy.random.RandomState(1)


def sequences(number):
    lengths = random.randint(2, 9, number)
    frames = [random.rand(length, 3).astype("float32") for length in lengths]
    return [{"data": one, "classes": (4 * one[:, 0]).astype("int64")} for one in frames]


train, dev = sequences(48), sequences(12)
batching = "random"
max_seqs = 8 // hvdtrain.size()
num_epochs = 3
num_threads = 1
log_interval = 0
lengths_dir = None
learning_rate = 0.05
learning_rate_control = "newbob"
learning_rate_control_error_measure = "dev_loss_ce"
learning_rate_schedule = {"class": "linear", "num_warmup_steps": 5, "num_steps": 30}
optimizer = {"class": "adam"}
ema_decay = 0.9
save_interval_steps = 4
crash_at = 0


class Crash:
    def on_step_end(self, training):
        if training.step == crash_at:
            raise RuntimeError("planted")


callbacks = [Crash]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.1)
        self.output = nn.Linear(3, 4)

    def forward(self, frames):
        return self.output(self.dropout(self.norm(frames)))


def get_model(**_):
    torch.manual_seed(1)
    return Model()


def train_step(*, model, extern_data, **_):
    data, classes = extern_data["data"], extern_data["classes"]
    scores, targets = model(data.raw_tensor[data.mask]), classes.raw_tensor[classes.mask]
    losses = nn.functional.cross_entropy(scores, targets, reduction="none")
    hvdtrain.get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True)
    hvdtrain.get_run_ctx().mark_as_loss(scores.argmax(-1) != targets, "fer", as_error=True)
