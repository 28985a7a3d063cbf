"""Augmentation: noise, speed and SpecAugment, so that a network understands calls from the street that it has never heard.

python -m hvdtrain configs/cookbook/augmentation.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/augmentation.py ++use_horovod 1
"""

from made_up import RATE, telephone_calls
from torch import nn

import hvdtrain

DATA = config.value("data", "data/cookbook")  # noqa: F821  `config` is defined while hvdtrain runs this file
MELS, LETTERS = 24, "0123456789"


def startup_callback(**_):
    """Before the data is opened. Your folders exist already: leave this function out."""
    hvdtrain.run_on_main(lambda: telephone_calls(DATA))


def calls(part):
    return {"class": "KaldiFolder", "folder": f"{DATA}/{part}", "units": "characters", "vocabulary": list(LETTERS)}


features = {"class": "LogMel", "sample_rate": RATE, "num_mels": MELS}
train = {
    "class": "MapDataset",
    "dataset": calls("train"),  # without any noise
    "datasets": {"noise": {"class": "KaldiFolder", "folder": f"{DATA}/noise", "units": None}},
    "map_seq": [
        {"class": "SpeedPerturbation", "factors": [0.98, 1.0, 1.02]},
        {"class": "AddNoise", "snr": [0.0, 20.0], "share": 0.8},
        features,
        {"class": "SpecAugment", "time_frames": 4, "feature_width": 2},
    ],
    "seq_ordering": "laplace:.100",
}
dev = {"class": "MapDataset", "dataset": calls("dev"), "map_seq": [features]}
eval_datasets = {"street": {"class": "MapDataset", "dataset": calls("street"), "map_seq": [features]}}
max_seqs_total = 10
num_epochs = 4
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.005
gradient_clip_global_norm = 5.0
early_stopping_measure = "street_loss_ctc"
model = "exp/cookbook/augmentation/model"


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
    data, classes = extern_data["data"], extern_data["classes"]
    log_probs, lengths, targets = model(data.raw_tensor), (data.seq_lens + 2) // 3, classes.raw_tensor.long()
    losses = nn.functional.ctc_loss(
        log_probs.transpose(0, 1), targets, lengths, classes.seq_lens, blank=len(LETTERS), reduction="none", zero_infinity=True
    )
    count = classes.seq_lens.sum()
    hvdtrain.get_run_ctx().mark_as_loss(losses, "ctc", use_normalized_loss=True, custom_inv_norm_factor=count)
