"""An acoustic-like model for a GPU, on random features: two convolutions and a stack of Transformer layers, and a class for every
fourth frame.

Used by benchmarks/gpu_loop.py, which creates the data. Nothing in the step waits for the device.
"""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import hvdtrain

train = {"files": str(Path(config.value("folder")) / "acoustic.hdf"), "seq_ordering": "laplace:.64"}
batch_size = 40_000
num_epochs = 2
learning_rate = 0.0003
optimizer = {"class": "adamw"}
gradient_clip_global_norm = 5.0

FEATURES, CLASSES = 80, 1000
width, num_layers = config.int("width", 512), config.int("layers", 12)


class Acoustic(nn.Module):
    """Two convolutions with a total stride of 4, then Transformer layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(FEATURES, width, 5, stride=2, padding=2)
        self.second = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.output = nn.Linear(width, CLASSES)

    def forward(self, frames, mask):
        """Frames of shape (batch, time, features) and which of every fourth are real, (batch, time / 4) -> class scores."""
        hidden = functional.relu(self.second(functional.relu(self.first(frames.transpose(1, 2))))).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~mask)
        return self.output(hidden)


def get_model(**_):
    torch.manual_seed(1)
    return Acoustic()


def loss_by_frame(model, frames, classes, mask):
    """The cross-entropy of every fourth frame, zero in the padding; shape (batch, time / 4)."""
    scores = model(frames, mask)
    return functional.cross_entropy(scores.transpose(1, 2), classes.long(), reduction="none") * mask


def train_step(*, model, extern_data, **_):
    features, classes = extern_data["data"], extern_data["classes"]
    losses = loss_by_frame(model, features.raw_tensor, classes.raw_tensor, classes.mask)
    context = hvdtrain.get_run_ctx()
    context.mark_as_loss(losses, "ce", use_normalized_loss=True, custom_inv_norm_factor=classes.seq_lens.sum())
