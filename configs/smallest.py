"""A recurrent network learns English spelling, letter by letter: the smallest config that trains."""

from torch import nn

import hvdtrain

train = {"class": "HDFDataset", "files": ["data/g2p/train.hdf"], "seq_ordering": "laplace:.2560"}
dev = {"class": "HDFDataset", "files": ["data/g2p/dev.hdf"]}
max_seqs_total = 256  # sequences per step, over all ranks
num_epochs = 2
num_threads = 1  # per rank
learning_rate = 0.003
model = "exp/smallest/model"


class NextLetter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(27, 64)
        self.gru = nn.GRU(64, 128, batch_first=True)
        self.output = nn.Linear(128, 27)

    def forward(self, letters):
        return self.output(self.gru(self.embedding(letters))[0])


def get_model(**_):
    return NextLetter()


def train_step(*, model, extern_data, **_):
    letters = extern_data["data"]  # raw_tensor (batch, time), seq_lens (batch,), mask (batch, time)
    scores = model(letters.raw_tensor)[:, :-1]
    targets, mask = letters.raw_tensor[:, 1:].long(), letters.mask[:, 1:]
    losses = nn.functional.cross_entropy(scores[mask], targets[mask], reduction="none")
    hvdtrain.get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True)
