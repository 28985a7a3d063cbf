"""Cuts of Lhotse: a convolutional network names the key that is pressed somewhere in a recording.

python -m hvdtrain configs/cookbook/lhotse_cuts.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/lhotse_cuts.py ++use_horovod 1
"""

from made_up import DIGITS, single_tones
from torch import nn

import hvdtrain

DATA = config.value("data", "data/cookbook/lhotse")  # noqa: F821  `config` is defined while hvdtrain runs this file
MELS = 24


def startup_callback(**_):
    """Before the data is opened. Your manifests exist already: leave this function out."""
    hvdtrain.run_on_main(lambda: single_tones(DATA))


def cuts(part):
    sound = {"features": "fbank", "log_mel": {"num_mels": MELS}}
    return {"class": "LhotseDataset", "cuts": f"{DATA}/{part}.jsonl.gz", **sound, "units": "words", "vocabulary": list(DIGITS)}


train = {**cuts("train"), "seq_ordering": "laplace:.100"}
dev = cuts("dev")
cache_size = "256M"  # features are computed in the first epoch
max_seqs_total = 20
num_epochs = 3
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.003
learning_rate_schedule = {"class": "cosine", "num_warmup_steps": 10, "final": 0.05}
early_stopping_measure = "dev_loss_error"
model = "exp/cookbook/lhotse_cuts/model"


class Spotter(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.norm = nn.LayerNorm(MELS)
        self.layers = nn.Sequential(
            nn.Conv1d(MELS, size, 5, padding=2), nn.ReLU(), nn.Conv1d(size, size, 5, padding=2), nn.ReLU()
        )
        self.output = nn.Linear(size, len(DIGITS))

    def forward(self, features, mask):
        """Scores of the words, (batch, words), from the strongest responses in the frames that are not padding."""
        hidden = self.layers(self.norm(features).transpose(1, 2))
        return self.output(hidden.masked_fill(~mask[:, None], float("-inf")).amax(-1))


def get_model(**_):
    return Spotter()


def train_step(*, model, extern_data, **_):
    context, data = hvdtrain.get_run_ctx(), extern_data["data"]
    words = extern_data["classes"].raw_tensor[:, 0].long()  # one word for each cut
    scores = model(data.raw_tensor, data.mask)
    context.mark_as_loss(nn.functional.cross_entropy(scores, words, reduction="none"), "ce", use_normalized_loss=True)
    context.mark_as_loss(scores.argmax(-1) != words, "error", as_error=True)
