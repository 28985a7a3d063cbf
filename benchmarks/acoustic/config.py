"""An acoustic-like model on random features, to measure where the time of a training goes.

Used by benchmarks/computing_time.py, which creates the data.
"""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
from pathlib import Path

import torch
from acoustic_model import CLASSES, Acoustic
from torch.nn import functional

import hvdtrain

folder = Path(config.value("folder"))
train = {"files": str(folder / "acoustic.hdf"), "seq_ordering": "laplace:.64"}
batch_size = 6000
num_epochs = 2
learning_rate = 0.001
optimizer = {"class": "adamw"}
gradient_clip_global_norm = 5.0


def get_model(**_):
    torch.manual_seed(1)
    return Acoustic()


def train_step(*, model, extern_data, **_):
    features, classes = extern_data["data"], extern_data["classes"]
    losses = functional.ctc_loss(
        model(features.raw_tensor).log_softmax(-1).transpose(0, 1),
        classes.raw_tensor,
        (features.seq_lens + 3) // 4,
        classes.seq_lens,
        blank=CLASSES,
        reduction="none",
        zero_infinity=True,
    )
    hvdtrain.get_run_ctx().mark_as_loss(losses, "ctc", use_normalized_loss=True)
