"""Streaming data: lines of files come one after the other, without an end; a network tells source code from English.

python -m hvdtrain configs/cookbook/streaming.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/streaming.py ++use_horovod 1
"""

import itertools
from pathlib import Path
from pydoc_data.topics import topics
from sysconfig import get_path

import numpy
from torch import nn

import hvdtrain

lengths_dir = config.value("lengths_dir", "data/cookbook/lengths")  # noqa: F821  defined while hvdtrain runs this file


def endless(files, texts):
    """A line of code, a line of English, and so on. Your generator may as well read a socket or unpack an archive."""
    code = (line for path in itertools.cycle(files) for line in path.read_text(encoding="utf-8").splitlines())
    english = (line for text in itertools.cycle(texts) for line in text.splitlines())
    for pair in zip(code, english):
        for is_english, line in enumerate(line.strip().encode() for line in pair):
            if len(line) > 15:
                yield {"data": numpy.frombuffer(line, numpy.uint8).astype(numpy.int32), "english": is_english}


library = sorted(Path(get_path("stdlib"), "email").glob("*.py"))
texts = [text for _, text in sorted(topics.items())]
train = {
    "class": "IterableDataset",
    "iterable": lambda: endless(library[4:], texts[10:]),
    "epoch_size": 2000,  # an epoch continues where the one before has ended
    "window": 500,  # so many lines are sorted into batches of similar lengths
    "seq_ordering": "laplace:.250",
    "dims": {"data": 256, "english": 2},
}
dev = list(itertools.islice(endless(library[:4], texts[:10]), 300))
max_seqs_total = 40
num_epochs = 3
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.005
learning_rate_schedule = {"class": "cosine", "num_warmup_steps": 10, "final": 0.05}
early_stopping_measure = "dev_loss_error"
model = "exp/cookbook/streaming/model"


class Reader(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.letters = nn.Embedding(256, size)
        self.convolution = nn.Conv1d(size, size, 5, padding=2)
        self.output = nn.Linear(size, 2)

    def forward(self, letters, mask):
        hidden = self.convolution((self.letters(letters) * mask[..., None]).transpose(1, 2)).relu()
        return self.output((hidden * mask[:, None]).amax(-1))


def get_model(**_):
    return Reader()


def train_step(*, model, extern_data, **_):
    context, data = hvdtrain.get_run_ctx(), extern_data["data"]
    is_english = extern_data["english"].raw_tensor[:, 0].long()
    scores = model(data.raw_tensor.long(), data.mask)
    context.mark_as_loss(nn.functional.cross_entropy(scores, is_english, reduction="none"), "ce", use_normalized_loss=True)
    context.mark_as_loss(scores.argmax(-1) != is_english, "error", as_error=True)
