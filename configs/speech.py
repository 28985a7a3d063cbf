"""Speech recognition from sound to words: a small conformer with CTC on characters, on synthetic speech in Kaldi folders.

make demo-speech                                     speak the sentences, once, and train on two ranks
python -m hvdtrain configs/speech.py                 train on one process
mpirun -np 2 --bind-to none python -m hvdtrain configs/speech.py ++use_horovod 1 ++max_seqs 16
"""

from pathlib import Path

import torch
from rapidfuzz.distance import Levenshtein
from torch import nn
from torch.nn import functional

import hvdtrain

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
root = Path(__file__).resolve().parent.parent
speech = Path(config.value("speech", str(root / "data/speech")))

backend = "torch"
model = str(root / "exp/speech/model")
log = str(root / "exp/speech/train.log")

MELS = 40
LETTERS = " abcdefghijklmnopqrstuvwxyz"
BLANK = len(LETTERS)


def kaldi(part):
    options = {"features": "fbank", "log_mel": {"num_mels": MELS}, "units": "characters", "vocabulary": list(LETTERS)}
    return {"class": "KaldiFolder", "folder": str(speech / part), **options}


train = {
    "class": "MapDataset",
    "dataset": kaldi("train"),
    "map_seq": [{"class": "SpecAugment", "time_frames": 20, "time_share": 0.1, "feature_width": 6}],
    "seq_ordering": "laplace:.320",
}
dev = kaldi("dev")
eval = kaldi("test")
cache_size = "256M"  # features are computed in the first epoch
max_seqs = 32  # per rank
skip_broken = 10

num_epochs = config.int("num_epochs", 14)
optimizer = {"class": "adamw", "weight_decay": 0.01, "betas": (0.9, 0.98)}
gradient_clip_global_norm = 5.0
learning_rate = 0.002


def dynamic_learning_rate(*, epoch_continuous, learning_rate, **_):
    """Linear warm-up over the first 10 % of the training, then linear decay to zero."""
    done = epoch_continuous / num_epochs
    return learning_rate * min(0.01 + done / 0.1, (1 - done) / 0.9)


class Attention(nn.Module):
    """Self-attention in which every frame sees all frames of its sequence."""

    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(channels, 3 * channels)
        self.output = nn.Linear(channels, channels)

    def forward(self, frames, mask):
        batch, time, channels = frames.shape
        query, key, value = self.inputs(frames).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        return self.output(seen.transpose(1, 2).reshape(batch, time, channels))


class Convolution(nn.Module):
    """A gated convolution for each channel by itself, which also tells the attention what comes before and after."""

    def __init__(self, channels, width):
        super().__init__()
        self.inputs = nn.Linear(channels, 2 * channels)
        self.convolution = nn.Conv1d(channels, channels, width, padding=width // 2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.output = nn.Linear(channels, channels)

    def forward(self, frames, mask):
        hidden = functional.glu(self.inputs(frames), dim=-1) * mask.unsqueeze(-1)  # keeps padding out of the convolution
        hidden = self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        return self.output(functional.silu(self.norm(hidden)))


class FeedForward(nn.Module):
    """Two layers, at half weight, as a conformer has them at both ends of a block."""

    def __init__(self, channels, factor):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(channels, factor * channels), nn.SiLU(), nn.Linear(factor * channels, channels))

    def forward(self, frames, mask):
        return 0.5 * self.layers(frames)


class Block(nn.Module):
    """A conformer block; normalization and dropout are around each of its four parts."""

    def __init__(self, channels, heads, width, dropout):
        super().__init__()
        parts = [FeedForward(channels, 3), Attention(channels, heads), Convolution(channels, width), FeedForward(channels, 3)]
        self.parts = nn.ModuleList(parts)
        self.norms = nn.ModuleList([nn.LayerNorm(channels) for _ in parts])
        self.dropout = nn.Dropout(dropout)

    def forward(self, frames, mask):
        for norm, part in zip(self.norms, self.parts):
            frames = frames + self.dropout(part(norm(frames), mask))
        return frames


class Conformer(nn.Module):
    """Map features (batch, time, MELS) to log probabilities of letters and blank, for every fourth frame."""

    def __init__(self, channels=96, blocks=4, heads=4, width=15, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(MELS)
        self.stride = nn.ModuleList([nn.Conv1d(MELS, channels, 5, 2, padding=2), nn.Conv1d(channels, channels, 5, 2, padding=2)])
        self.blocks = nn.ModuleList([Block(channels, heads, width, dropout) for _ in range(blocks)])
        self.last = nn.LayerNorm(channels)
        self.output = nn.Linear(channels, len(LETTERS) + 1)

    def forward(self, features, seq_lens):
        """Returns the log probabilities, and the numbers of frames that have some."""
        frames = self.norm(features)
        mask = mask_of(frames, seq_lens)
        for convolution in self.stride:
            frames = functional.silu(convolution((frames * mask.unsqueeze(-1)).transpose(1, 2))).transpose(1, 2)
            seq_lens = (seq_lens + 1) // 2
            mask = mask_of(frames, seq_lens)
        for block in self.blocks:
            frames = block(frames, mask)
        return self.output(self.last(frames)).log_softmax(-1), seq_lens


def mask_of(frames, seq_lens):
    return torch.arange(frames.shape[1], device=frames.device) < seq_lens.to(frames.device).unsqueeze(1)


def get_model(**_):
    return Conformer()


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    data, classes = extern_data["data"], extern_data["classes"]
    log_probs, seq_lens = model(data.raw_tensor, data.seq_lens)
    losses = functional.ctc_loss(
        log_probs.transpose(0, 1), classes.raw_tensor.long(), seq_lens, classes.seq_lens, blank=BLANK, reduction="none"
    )
    context.mark_as_loss(losses, "ctc", use_normalized_loss=True)
    if not context.train_flag:
        words = list(zip(decode(log_probs, seq_lens), references(classes)))
        distances = torch.tensor([Levenshtein.distance(found, expected) for found, expected in words])
        context.mark_as_loss(distances, "wer", as_error=True, custom_inv_norm_factor=sum(len(expected) for _, expected in words))


def forward_step(*, model, extern_data, **_):
    """Marks the letters of each sentence as classes, for `task = "search"` and the like."""
    data = extern_data["data"]
    log_probs, seq_lens = model(data.raw_tensor, data.seq_lens)
    hvdtrain.get_run_ctx().mark_as_output(log_probs, "log_probs", seq_lens=seq_lens)


def decode(log_probs, seq_lens):
    """The words of the best path of each sentence."""
    for path, frames in zip(log_probs.argmax(-1).cpu(), seq_lens):
        yield text_of(number for number in torch.unique_consecutive(path[:frames]).tolist() if number != BLANK).split()


def references(classes):
    """The words of the transcripts."""
    for row, length in zip(classes.raw_tensor.cpu(), classes.seq_lens):
        yield text_of(row[:length].tolist()).split()


def text_of(numbers):
    return "".join(LETTERS[number] for number in numbers)
