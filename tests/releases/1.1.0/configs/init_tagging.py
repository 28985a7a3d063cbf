"""Tagging: a bidirectional LSTM learns to give every token of a sentence a tag.

    python -m hvdtrain init_tagging.py                                                trains in one process
    python -m hvdtrain init_tagging.py ++ngpu 2                                       on two ranks of this host
    mpirun -np 2 --bind-to none python -m hvdtrain init_tagging.py ++use_horovod 1    on two Horovod ranks
    python -m hvdtrain init_tagging.py --find-learning-rate                           suggests a learning rate
    python -m hvdtrain init_tagging.py ++task forward ++output_file tags.hdf          writes the tags of `forward_data`

The same command continues a training that was stopped. ++KEY VALUE overrides any key: ++num_epochs 5.
"""

import numpy
import torch
from torch import nn

import hvdtrain

TOKENS, TAGS = 100, 6


class Sentences(torch.utils.data.Dataset):
    """Made-up data, in place of yours: an item is a dict of arrays of the same length, the tokens and their tags."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed
        self.kinds = numpy.random.default_rng(0).integers(TAGS, size=TOKENS)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = numpy.random.default_rng([self.seed, index])
        tokens = generator.integers(TOKENS, size=generator.integers(5, 30))
        kinds = self.kinds[tokens]
        tags = (kinds + numpy.append(kinds[1:], 0) // 3) % TAGS  # the next token matters, too
        return {"data": tokens.astype(numpy.int32), "tags": tags.astype(numpy.int32)}


train = {"class": Sentences, "size": 2000, "seed": 1, "seq_ordering": "laplace:.500"}  # random, in bins of similar lengths
dev = {"class": Sentences, "size": 200, "seed": 2}  # evaluated after every epoch
forward_data = {"class": Sentences, "size": 20, "seed": 3}

batch_size = 1000  # tokens per rank and step, with padding
num_epochs = 5
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.01
learning_rate_schedule = {"class": "linear", "num_warmup_epochs": 0.5}
gradient_clip_global_norm = 5.0
ema_decay = 0.99  # evaluates and saves an average of the weights; 0.999 or more for a training of many thousands of steps
early_stopping_measure = "dev_loss_error"  # the score by which epochs are compared
early_stopping_patience = 5  # ends training after 5 epochs without a better score
cleanup_old_models = {"keep_last_n": 2, "keep_best_n": 1, "keep": []}
model = "exp/init_tagging/model"  # checkpoints: exp/init_tagging/model.001.pt, ...

# preload_from_files = {"embedding": {"filename": "vectors.pt", "prefix": "embedding.", "init_for_train": True}}


class Tagger(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, size)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * size, TAGS)

    def forward(self, tokens, seq_lens):
        """The scores of the tags: (batch, time, TAGS)."""
        embedded = self.dropout(self.embedding(tokens))
        packed = nn.utils.rnn.pack_padded_sequence(embedded, seq_lens, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.output(self.dropout(hidden))


def get_model(**_):
    return Tagger()


def train_step(*, model, extern_data, **_):
    """The losses of a batch: one number per token, so that N ranks compute what one rank does."""
    data, tags = extern_data["data"], extern_data["tags"]
    scores = model(data.raw_tensor.long(), data.seq_lens)[data.mask]
    targets = tags.raw_tensor[tags.mask].long()
    context = hvdtrain.get_run_ctx()
    losses = nn.functional.cross_entropy(scores, targets, reduction="none", label_smoothing=0.1)
    context.mark_as_loss(losses, "ce", use_normalized_loss=True)
    context.mark_as_loss(scores.argmax(-1) != targets, "error", as_error=True)
    if not context.train_flag:  # the errors of a single tag, of which there may be few: a mean over the tokens that have it
        is_rare = targets == TAGS - 1
        context.mark_as_loss(scores.argmax(-1)[is_rare] != TAGS - 1, "rare_error", as_error=True)


def forward_step(*, model, extern_data, **_):
    data = extern_data["data"]
    tags = model(data.raw_tensor.long(), data.seq_lens).argmax(-1).int()
    hvdtrain.get_run_ctx().mark_as_default_output(tags, seq_lens=data.seq_lens)
