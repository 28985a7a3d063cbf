"""Speech recognition from sound to words: a small conformer with CTC on characters, on synthetic speech in Kaldi folders.

Batches are packed: the frames of a sentence follow those of another one, without padding, so the model needs no masks.

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
packed = True
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

    def forward(self, frames, sentences):
        query, key, value = self.inputs(frames).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return self.output(sentences.attention(query, key, value).flatten(1))


class Convolution(nn.Module):
    """A gated convolution for each channel by itself, which also informs the attention about what comes before and after."""

    def __init__(self, channels, width):
        super().__init__()
        self.inputs = nn.Linear(channels, 2 * channels)
        self.convolution = nn.Conv1d(channels, channels, width, padding=width // 2, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.output = nn.Linear(channels, channels)

    def forward(self, frames, sentences):
        hidden = sentences.conv1d(self.convolution, functional.glu(self.inputs(frames), dim=-1)).raw_tensor
        return self.output(functional.silu(self.norm(hidden)))


class FeedForward(nn.Module):
    """Two layers, at half weight, as a conformer has them at both ends of a block."""

    def __init__(self, channels, factor):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(channels, factor * channels), nn.SiLU(), nn.Linear(factor * channels, channels))

    def forward(self, frames, sentences):
        return 0.5 * self.layers(frames)


class Block(nn.Module):
    """A conformer block; normalization and dropout are around each of its four parts."""

    def __init__(self, channels, heads, width, dropout):
        super().__init__()
        parts = [FeedForward(channels, 3), Attention(channels, heads), Convolution(channels, width), FeedForward(channels, 3)]
        self.parts = nn.ModuleList(parts)
        self.norms = nn.ModuleList([nn.LayerNorm(channels) for _ in parts])
        self.dropout = nn.Dropout(dropout)

    def forward(self, frames, sentences):
        for norm, part in zip(self.norms, self.parts):
            frames = frames + self.dropout(part(norm(frames), sentences))
        return frames


class Conformer(nn.Module):
    """Map packed features (frames, MELS) to log probabilities of letters and blank, for every fourth frame."""

    def __init__(self, channels=96, blocks=4, heads=4, width=15, dropout=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(MELS)
        self.stride = nn.ModuleList([nn.Conv1d(MELS, channels, 5, 2, padding=2), nn.Conv1d(channels, channels, 5, 2, padding=2)])
        self.blocks = nn.ModuleList([Block(channels, heads, width, dropout) for _ in range(blocks)])
        self.last = nn.LayerNorm(channels)
        self.output = nn.Linear(channels, len(LETTERS) + 1)

    def forward(self, features):
        """Returns packed data, shorter than the features."""
        sentences = features.with_values(self.norm(features.raw_tensor))
        for convolution in self.stride:
            sentences = sentences.conv1d(convolution)
            sentences.raw_tensor = functional.silu(sentences.raw_tensor)
        frames = sentences.raw_tensor
        for block in self.blocks:
            frames = block(frames, sentences)
        sentences.raw_tensor = self.output(self.last(frames)).log_softmax(-1)
        return sentences


def get_model(**_):
    return Conformer()


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    classes = extern_data["classes"]
    log_probs = model(extern_data["data"])
    losses = functional.ctc_loss(
        log_probs.padded().transpose(0, 1),
        classes.raw_tensor.long(),
        log_probs.seq_lens,
        classes.seq_lens,
        blank=BLANK,
        reduction="none",
    )
    context.mark_as_loss(losses, "ctc", use_normalized_loss=True)
    if not context.train_flag:
        words = list(zip(decode(log_probs), references(classes)))
        distances = torch.tensor([Levenshtein.distance(found, expected) for found, expected in words])
        context.mark_as_loss(distances, "wer", as_error=True, custom_inv_norm_factor=sum(len(expected) for _, expected in words))


def forward_step(*, model, extern_data, **_):
    """Marks the log probabilities of letters, for `task = "search"` and the like."""
    log_probs = model(extern_data["data"])
    hvdtrain.get_run_ctx().mark_as_output(log_probs.raw_tensor, "log_probs", seq_lens=log_probs.seq_lens)


def decode(log_probs):
    """The words of the best path of each sentence."""
    for path in log_probs.split(log_probs.raw_tensor.argmax(-1).cpu()):
        yield text_of(number for number in path.unique_consecutive().tolist() if number != BLANK).split()


def references(classes):
    """The words of the transcripts."""
    for letters in classes.split():
        yield text_of(letters.tolist()).split()


def text_of(numbers):
    return "".join(LETTERS[number] for number in numbers)
