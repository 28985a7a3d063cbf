"""Grapheme-to-phoneme conversion on the CMU Pronouncing Dictionary: a convolutional CTC model that is small enough for a CPU.

make data                                                          create the HDF files, once
python -m hvdtrain configs/g2p.py                                  train on one process
mpirun -np 2 --bind-to none python -m hvdtrain configs/g2p.py ++use_horovod 1 ++max_seqs 128
"""

from pathlib import Path

import torch
from rapidfuzz.distance import Levenshtein
from torch import nn
from torch.nn import functional

import hvdtrain

root = Path(__file__).resolve().parent.parent

task = "train"
backend = "torch"
model = str(root / "exp/g2p/model")
log = str(root / "exp/g2p/train.log")

# Bins of ten batches, sorted by length in alternating direction, so that the sequences of a batch need little padding.
train = {"class": "HDFDataset", "files": str(root / "data/g2p/train.hdf"), "seq_ordering": "laplace:.2560"}
dev = {"class": "HDFDataset", "files": str(root / "data/g2p/dev.hdf")}
eval = {"class": "HDFDataset", "files": str(root / "data/g2p/test.hdf")}
max_seqs = 256  # per rank

num_epochs = config.int("num_epochs", 24)  # noqa: F821  `config` is defined while hvdtrain runs this file
optimizer = {"class": "adamw", "weight_decay": 0.01, "betas": (0.9, 0.98)}
gradient_clip_global_norm = 5.0
learning_rate = 0.002


def dynamic_learning_rate(*, epoch_continuous, learning_rate, **_):
    """Linear warm-up over the first 5 % of the training, then linear decay to zero."""
    done = epoch_continuous / num_epochs
    return learning_rate * min(0.01 + done / 0.05, (1 - done) / 0.95)


LETTERS, PHONES = 27, 39
BLANK = PHONES  # CTC's blank, after the phones
BETWEEN = PHONES  # separates the pronunciations in the data key `variants`
UPSAMPLE = 2  # frames per letter: some letters stand for two phones (x: K S)


class GatedBlock(nn.Module):
    """A residual block: layer normalization, convolution over time, gated linear unit."""

    def __init__(self, channels, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.convolution = nn.Conv1d(channels, 2 * channels, width, padding=width // 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, frames, mask):
        """Map frames (batch, time, channels), with mask (batch, time, 1), to the same shape."""
        hidden = self.norm(frames) * mask  # keeps padding out of the convolution
        hidden = functional.glu(self.convolution(hidden.transpose(1, 2)), dim=1).transpose(1, 2)
        return frames + self.dropout(hidden)


class LettersToPhones(nn.Module):
    """Map letters (batch, time) to log probabilities of phones and blank (batch, UPSAMPLE * time, PHONES + 1)."""

    def __init__(self, channels=160, letter_layers=4, phone_layers=3, width=5, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, channels)
        self.letter_blocks = nn.ModuleList([GatedBlock(channels, width, dropout) for _ in range(letter_layers)])
        self.place = nn.Parameter(0.5 * torch.randn(UPSAMPLE, channels))  # distinguishes the frames of a letter
        self.phone_blocks = nn.ModuleList([GatedBlock(channels, width, dropout) for _ in range(phone_layers)])
        self.norm = nn.LayerNorm(channels)
        self.output = nn.Linear(channels, PHONES + 1)

    def forward(self, letters, mask):
        frames = self.embedding(letters)
        mask = mask.unsqueeze(-1).to(frames.dtype)
        for block in self.letter_blocks:
            frames = block(frames, mask)
        frames = (frames[:, :, None] + self.place).flatten(1, 2)
        mask = mask.repeat_interleave(UPSAMPLE, dim=1)
        for block in self.phone_blocks:
            frames = block(frames, mask)
        return self.output(self.norm(frames)).log_softmax(-1)


def get_model(**_):
    return LettersToPhones()


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    letters, phones = extern_data["data"], extern_data["classes"]
    log_probs = model(letters.raw_tensor, letters.mask)
    losses = functional.ctc_loss(
        log_probs.transpose(0, 1),
        phones.raw_tensor,
        letters.seq_lens * UPSAMPLE,
        phones.seq_lens,
        blank=BLANK,
        reduction="none",
        zero_infinity=True,  # a word with more phones than frames
    )
    context.mark_as_loss(losses, "ctc", use_normalized_loss=True)
    if not context.train_flag:
        distances, lengths = zip(*compare(log_probs, letters.seq_lens * UPSAMPLE, extern_data["variants"]))
        distances = torch.tensor(distances)
        context.mark_as_loss(distances, "per", as_error=True, custom_inv_norm_factor=sum(lengths))
        context.mark_as_loss(distances > 0, "wer", as_error=True)


def compare(log_probs, seq_lens, variants):
    """For each word, the edit distance to the closest pronunciation in the dictionary, and the length of that one."""
    best = log_probs.argmax(-1).cpu()
    for path, frames, classes, length in zip(best, seq_lens, variants.raw_tensor.cpu(), variants.seq_lens):
        decoded = [phone for phone in torch.unique_consecutive(path[:frames]).tolist() if phone != BLANK]
        references = [[]]
        for phone in classes[:length].tolist():
            if phone == BETWEEN:
                references.append([])
            else:
                references[-1].append(phone)
        yield min((Levenshtein.distance(decoded, reference), len(reference)) for reference in references)
