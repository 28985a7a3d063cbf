"""Distillation: a small network learns from the tagger of tagging.py, whose answers say more than the right tags do.

python -m hvdtrain configs/cookbook/distillation.py                after tagging.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/distillation.py ++use_horovod 1
"""

from tagging import TAGS, Tagger, dev, train  # noqa: F401  the same data
from torch import nn

import hvdtrain

TEACHER = config.value("teacher", "exp/cookbook/tagging/model.003.pt")  # noqa: F821  defined while hvdtrain runs this file
TEMPERATURE = 2.0

batching = "random"
chunking = "100:100"  # characters; files stay whole in an evaluation
max_seqs_total = 20
num_epochs = 4
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.01
learning_rate_schedule = {"class": "cosine", "num_warmup_steps": 10, "final": 0.05}
gradient_clip_global_norm = 1.0
early_stopping_measure = "dev_loss_error"
extra_models = {"teacher": {"get_model": lambda **_: Tagger(), "load": TEACHER}}  # frozen, and not saved
model = "exp/cookbook/distillation/model"


class Student(nn.Module):
    """Convolutions that see 63 characters: a third of the teacher's parameters, and no recurrence."""

    def __init__(self, size=24):
        super().__init__()
        self.letters = nn.Embedding(256, size)
        self.layers = nn.ModuleList([nn.Conv1d(size, size, 3, padding=2**n, dilation=2**n) for n in range(5)])
        self.output = nn.Linear(size, len(TAGS))

    def forward(self, letters, mask):
        hidden, mask = self.letters(letters).transpose(1, 2), mask[:, None]
        for layer in self.layers:
            hidden = hidden + layer(hidden * mask).relu()
        return self.output(hidden.transpose(1, 2))


def get_model(**_):
    return Student()


def train_step(*, model, extern_data, **_):
    context, data, tags = hvdtrain.get_run_ctx(), extern_data["data"], extern_data["tags"]
    letters, targets = data.raw_tensor.long(), tags.raw_tensor.long()[tags.mask]
    scores = model(letters, data.mask)[data.mask]
    teacher = context.extra_models["teacher"]
    wanted = teacher(letters, data.seq_lens)[data.mask]
    soft = nn.functional.kl_div(
        (scores / TEMPERATURE).log_softmax(-1), (wanted / TEMPERATURE).log_softmax(-1), reduction="none", log_target=True
    )
    context.mark_as_loss(soft.sum(-1) * TEMPERATURE**2, "teacher", use_normalized_loss=True)
    hard = nn.functional.cross_entropy(scores, targets, reduction="none")
    context.mark_as_loss(hard, "ce", scale=0.3, use_normalized_loss=True)
    context.mark_as_loss(scores.argmax(-1) != targets, "error", as_error=True)
