"""A language model: a Transformer predicts the next character of Python's documentation, which every Python has.

python -m hvdtrain configs/cookbook/language_model.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/language_model.py ++use_horovod 1
"""

from pydoc_data.topics import topics

import numpy
import torch
from torch import nn

import hvdtrain


def paragraphs(texts, shortest=40, longest=400):
    """The paragraphs of texts, as arrays of bytes."""
    parts = [" ".join(part.split()).encode() for text in texts for part in text.split("\n\n")]
    return [numpy.frombuffer(part, numpy.uint8).astype(numpy.int32) for part in parts if shortest <= len(part) <= longest]


train = paragraphs(text for name, text in sorted(topics.items()) if name < "c")
dev = paragraphs(text for name, text in sorted(topics.items()) if name >= "x")
batching = "laplace:.200"
batch_size_total = 1000  # characters per step, over all ranks
num_epochs = 3
optimizer = {"class": "adamw", "weight_decay": 0.1, "betas": (0.9, 0.95)}
learning_rate = 0.004
learning_rate_schedule = {"class": "cosine", "num_warmup_steps": 10, "final": 0.1}
gradient_clip_global_norm = 1.0
model = "exp/cookbook/language_model/model"


class Block(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.inputs, self.attended = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.feed_forward = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, hidden):
        parts = self.inputs(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        # Padding is at the end, so no character sees it.
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attended(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Decoder(nn.Module):
    def __init__(self, size=64, layers=2, heads=4, longest=512):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, size), nn.Embedding(longest, size)
        self.blocks = nn.Sequential(*[Block(size, heads) for _ in range(layers)])
        self.output = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 256))

    def forward(self, text):
        """The scores of the next character after each: (batch, time, 256)."""
        hidden = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return self.output(self.blocks(hidden))


def get_model(**_):
    return Decoder()


def train_step(*, model, extern_data, **_):
    context, data = hvdtrain.get_run_ctx(), extern_data["data"]
    text, is_real = data.raw_tensor.long(), data.mask[:, 1:]
    scores, targets = model(text[:, :-1])[is_real], text[:, 1:][is_real]
    context.mark_as_loss(nn.functional.cross_entropy(scores, targets, reduction="none"), "ce", use_normalized_loss=True)
    context.mark_as_loss(scores.argmax(-1) != targets, "error", as_error=True)
