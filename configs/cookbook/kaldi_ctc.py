"""CTC from a Kaldi folder: a recurrent network writes down the number that a telephone dials.

python -m hvdtrain configs/cookbook/kaldi_ctc.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/kaldi_ctc.py ++use_horovod 1
"""

import torch
from made_up import telephone_calls
from rapidfuzz.distance import Levenshtein
from torch import nn

import hvdtrain

DATA = config.value("data", "data/cookbook")  # noqa: F821  `config` is defined while hvdtrain runs this file
MELS, LETTERS = 24, "0123456789"
BLANK = len(LETTERS)


def startup_callback(**_):
    """Before the data is opened. Your folders exist already: leave this function out."""
    hvdtrain.run_on_main(lambda: telephone_calls(DATA))


def calls(part):
    sound = {"features": "fbank", "log_mel": {"num_mels": MELS}}
    return {"class": "KaldiFolder", "folder": f"{DATA}/{part}", **sound, "units": "characters", "vocabulary": list(LETTERS)}


train = {**calls("train"), "seq_ordering": "laplace:.100"}
dev = calls("dev")
cache_size = "256M"  # features are computed in the first epoch
max_seqs_total = 10
num_epochs = 4
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.005
gradient_clip_global_norm = 5.0
early_stopping_measure = "dev_loss_errors"
model = "exp/cookbook/kaldi_ctc/model"


class Recognizer(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.norm = nn.LayerNorm(MELS)
        self.stride = nn.Conv1d(MELS, size, 5, stride=3, padding=2)
        self.gru = nn.GRU(size, size, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * size, len(LETTERS) + 1)

    def forward(self, features):
        hidden = self.stride(self.norm(features).transpose(1, 2)).relu().transpose(1, 2)
        return self.output(self.gru(hidden)[0]).log_softmax(-1)


def get_model(**_):
    return Recognizer()


def train_step(*, model, extern_data, **_):
    context, data, classes = hvdtrain.get_run_ctx(), extern_data["data"], extern_data["classes"]
    log_probs, lengths = model(data.raw_tensor), (data.seq_lens + 2) // 3
    targets, count = classes.raw_tensor.long(), classes.seq_lens.sum()
    losses = nn.functional.ctc_loss(
        log_probs.transpose(0, 1), targets, lengths, classes.seq_lens, blank=BLANK, reduction="none", zero_infinity=True
    )
    context.mark_as_loss(losses, "ctc", use_normalized_loss=True, custom_inv_norm_factor=count)
    if not context.train_flag:
        found = [[one for one in path[:n].unique_consecutive().tolist() if one != BLANK] for path, n in paths(log_probs, lengths)]
        expected = [row[:length].tolist() for row, length in zip(targets, classes.seq_lens)]
        errors = torch.tensor([Levenshtein.distance(one, other) for one, other in zip(found, expected)])
        context.mark_as_loss(errors, "errors", as_error=True, custom_inv_norm_factor=count)


def paths(log_probs, lengths):
    return zip(log_probs.argmax(-1).cpu(), lengths)
