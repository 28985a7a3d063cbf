"""A recurrent network learns to count, such as 3 5 7 9 1 3: the smallest config that trains."""

import numpy
from torch import nn

import hvdtrain

rng = numpy.random.default_rng(1)  # made-up data, in place of yours: a list of arrays of different lengths
sequences = [(rng.integers(10) + rng.integers(1, 10) * numpy.arange(rng.integers(5, 20))) % 10 for _ in range(5500)]

train, dev = sequences[500:], sequences[:500]
batching = "laplace:.500"  # a random order, in bins of similar lengths
max_seqs_total = 50  # sequences per step, over all ranks
num_epochs = 3
num_threads = 1  # per rank
learning_rate = 0.003
model = "exp/smallest/model"


class NextDigit(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.output = nn.Linear(64, 10)

    def forward(self, digits):
        return self.output(self.gru(self.embedding(digits))[0])


def get_model(**_):
    return NextDigit()


def train_step(*, model, extern_data, **_):
    digits = extern_data["data"]  # raw_tensor (batch, time), seq_lens (batch,), mask (batch, time)
    scores, targets, mask = model(digits.raw_tensor)[:, :-1], digits.raw_tensor[:, 1:], digits.mask[:, 1:]
    losses = nn.functional.cross_entropy(scores[mask], targets[mask], reduction="none")
    hvdtrain.get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True)
