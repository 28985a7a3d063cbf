"""Several tasks: one encoder for what is dialled (CTC) and for the telephone that it is dialled with.

python -m hvdtrain configs/cookbook/multi_task.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/multi_task.py ++use_horovod 1
"""

from made_up import TELEPHONES, telephone_calls
from torch import nn

import hvdtrain

DATA = config.value("data", "data/cookbook")  # noqa: F821  `config` is defined while hvdtrain runs this file
MELS, LETTERS = 24, "0123456789"


def startup_callback(**_):
    """Before the data is opened. Your folders exist already: leave this function out."""
    hvdtrain.run_on_main(lambda: telephone_calls(DATA))


def calls(part):
    return {
        "class": "KaldiFolder",
        "folder": f"{DATA}/{part}",
        "features": "fbank",
        "log_mel": {"num_mels": MELS},
        "units": "characters",
        "data_keys": {"speaker": ("utt2spk", "words")},  # more of an utterance than sound and text
        "vocabulary": {"classes": list(LETTERS), "speaker": list(TELEPHONES)},
    }


train = {**calls("train"), "seq_ordering": "laplace:.100"}
dev = calls("dev")
cache_size = "256M"  # features are computed in the first epoch
max_seqs_total = 10
num_epochs = 7
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.005
gradient_clip_global_norm = 5.0
early_stopping_measure = "dev_loss_ctc"  # the sum of the losses has other weights in every epoch
model = "exp/cookbook/multi_task/model"


class Listener(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.norm = nn.LayerNorm(MELS)
        self.stride = nn.Conv1d(MELS, size, 5, stride=3, padding=2)
        self.gru = nn.GRU(size, size, batch_first=True, bidirectional=True)
        self.letters, self.speaker = nn.Linear(2 * size, len(LETTERS) + 1), nn.Linear(2 * size, len(TELEPHONES))

    def forward(self, features, mask):
        """The log probabilities of letters in every third frame, and the scores of the telephones."""
        hidden = self.stride(self.norm(features).transpose(1, 2)).relu().transpose(1, 2)
        hidden, mask = self.gru(hidden)[0], mask[:, ::3, None]
        return self.letters(hidden).log_softmax(-1), self.speaker((hidden * mask).sum(1) / mask.sum(1))


def get_model(**_):
    return Listener()


def train_step(*, model, extern_data, **_):
    context, data, classes = hvdtrain.get_run_ctx(), extern_data["data"], extern_data["classes"]
    log_probs, scores = model(data.raw_tensor, data.mask)
    lengths, targets = (data.seq_lens + 2) // 3, classes.raw_tensor.long()
    ctc = nn.functional.ctc_loss(
        log_probs.transpose(0, 1), targets, lengths, classes.seq_lens, blank=len(LETTERS), reduction="none", zero_infinity=True
    )
    context.mark_as_loss(ctc, "ctc", use_normalized_loss=True, custom_inv_norm_factor=classes.seq_lens.sum())
    speakers = extern_data["speaker"].raw_tensor[:, 0].long()
    losses = nn.functional.cross_entropy(scores, speakers, reduction="none")
    context.mark_as_loss(losses, "speaker", scale=max(0.1, 1.0 - 0.1 * context.epoch), use_normalized_loss=True)
    context.mark_as_loss(scores.argmax(-1) != speakers, "speaker_error", as_error=True)
