"""Tagging: a recurrent network learns to highlight Python, from the source code of the standard library.

python -m hvdtrain configs/cookbook/tagging.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/tagging.py ++use_horovod 1
"""

import keyword
import tokenize
from pathlib import Path
from sysconfig import get_path

import numpy
from torch import nn

import hvdtrain

TAGS = ("other", "keyword", "name", "number", "string", "comment", "operator")


def highlighted(path):
    """The characters of a file, and the tag of each."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    starts = numpy.cumsum([0, *map(len, lines)])
    tags = numpy.zeros(starts[-1], numpy.int32)
    for token in tokenize.generate_tokens(iter(lines).__next__):
        name = tokenize.tok_name[token.type].removeprefix("FSTRING_").replace("START", "STRING").replace("MIDDLE", "STRING")
        tag = "keyword" if keyword.iskeyword(token.string) else {"OP": "operator", "END": "string"}.get(name, name.lower())
        (first, begin), (last, end) = token.start, token.end
        if tag in TAGS and last <= len(lines):
            tags[starts[first - 1] + begin : starts[last - 1] + end] = TAGS.index(tag)
    return {"data": numpy.minimum([ord(letter) for letter in "".join(lines)], 255).astype(numpy.int32), "tags": tags}


library = [path for path in sorted(Path(get_path("stdlib")).glob("[a-p]*.py")) if 4000 < path.stat().st_size < 8000]
train = [highlighted(path) for path in library[2:11]]
dev = [highlighted(path) for path in library[:2]]
batching = "random"
chunking = "100:100"  # characters; files stay whole in an evaluation
max_seqs_total = 20
num_epochs = 3
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.015
learning_rate_schedule = {"class": "linear", "num_warmup_steps": 10, "final": 0.0005}
gradient_clip_global_norm = 1.0
early_stopping_measure = "dev_loss_error"
model = "exp/cookbook/tagging/model"


class Tagger(nn.Module):
    def __init__(self, size=48):
        super().__init__()
        self.letters = nn.Embedding(256, size)
        self.lstm = nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * size, len(TAGS))

    def forward(self, letters, seq_lens):
        packed = nn.utils.rnn.pack_padded_sequence(self.letters(letters), seq_lens, batch_first=True, enforce_sorted=False)
        return self.output(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def get_model(**_):
    return Tagger()


def train_step(*, model, extern_data, **_):
    context, data, tags = hvdtrain.get_run_ctx(), extern_data["data"], extern_data["tags"]
    scores = model(data.raw_tensor.long(), data.seq_lens)[data.mask]
    targets = tags.raw_tensor.long()[tags.mask]
    context.mark_as_loss(nn.functional.cross_entropy(scores, targets, reduction="none"), "ce", use_normalized_loss=True)
    context.mark_as_loss(scores.argmax(-1) != targets, "error", as_error=True)
