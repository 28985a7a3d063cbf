"""Grapheme-to-phoneme conversion with a transducer (RNN-T; Graves, 2012), in plain PyTorch: the data of g2p.py.

make data                                                          create the HDF files, once
python -m hvdtrain configs/g2p_transducer.py                       train on one process

A letter may stand for any number of phones, and each phone depends on those before. The average of the best five epochs is made
at the end.
"""

from pathlib import Path

import torch
from rapidfuzz.distance import Levenshtein
from torch import nn

import hvdtrain

root = Path(__file__).resolve().parent.parent

model = str(root / "exp/g2p_transducer/model")
log = str(root / "exp/g2p_transducer/train.log")
train = {"class": "HDFDataset", "files": str(root / "data/g2p/train.hdf"), "seq_ordering": "laplace:.2560"}
dev = {"class": "HDFDataset", "files": str(root / "data/g2p/dev.hdf")}
eval = {"class": "HDFDataset", "files": str(root / "data/g2p/test.hdf")}
max_seqs_total = 256  # over all ranks

num_epochs = config.int("num_epochs", 24)  # noqa: F821  `config` is defined while hvdtrain runs this file
optimizer = {"class": "adamw", "weight_decay": 0.01, "betas": (0.9, 0.98)}
gradient_clip_global_norm = 5.0
learning_rate = 0.002
learning_rate_schedule = {"class": "linear", "num_warmup_steps": 500, "final": 0.0}
early_stopping_measure = "dev_loss_wer"  # also for the best epochs
average_checkpoints = {"best": 5}
cleanup_old_models = {"keep_last_n": 1, "keep_best_n": 1, "keep": []}

LETTERS, PHONES = 27, 39
BLANK = PHONES  # after the phones; the predictor begins with it, too
BETWEEN = PHONES  # separates the pronunciations in the data key `variants`
MOST = 3  # phones that decoding takes from one letter


class Transducer(nn.Module):
    """Scores of the next phone, or of blank, for every letter and every number of phones before."""

    def __init__(self, channels=192, dropout=0.2):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, channels)
        self.encoder = nn.LSTM(channels, channels, 2, batch_first=True, bidirectional=True, dropout=dropout)
        self.from_letters = nn.Linear(2 * channels, channels)
        self.phones = nn.Embedding(PHONES + 1, channels)
        self.predictor = nn.LSTM(channels, channels, batch_first=True)
        self.from_phones = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(channels, PHONES + 1)

    def encode(self, letters, seq_lens):
        """Map letters (batch, time) to (batch, time, channels)."""
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(self.letters(letters)), seq_lens, batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        return self.from_letters(self.dropout(hidden))

    def predict(self, phones, state=None):
        """Map the phones so far (batch, phones) to (batch, phones, channels), and the state after them."""
        hidden, state = self.predictor(self.dropout(self.phones(phones)), state)
        return self.from_phones(self.dropout(hidden)), state

    def join(self, encoded, predicted):
        """Log probabilities (..., PHONES + 1)."""
        return self.output(torch.tanh(encoded + predicted)).log_softmax(-1)

    def forward(self, letters, seq_lens, phones):
        """Log probabilities (batch, time, 1 + phones, PHONES + 1)."""
        predicted, _ = self.predict(nn.functional.pad(phones, (1, 0), value=BLANK))
        return self.join(self.encode(letters, seq_lens)[:, :, None], predicted[:, None])


def transducer_loss(log_probs, phones, num_frames, num_phones):
    """-log p(phones) of each sequence: the sum over all ways through the lattice of frames and phones.

    After frame t and phone u, the ways have the total probability alpha(t, u). Within a frame, alpha(t, u) is the sum of
    alpha(t, u-1) times the phone u, and of alpha(t-1, u) times blank. Divided by the product of the frame's phones up to u, it is
    a running sum.
    """
    batch, frames, steps, _ = log_probs.shape
    blank = log_probs[..., BLANK]
    emit = log_probs[:, :, :-1].gather(-1, phones[:, None, :, None].expand(-1, frames, -1, 1)).squeeze(-1)
    emitted = nn.functional.pad(emit.cumsum(-1), (1, 0))  # of the frame's first u phones
    alpha = log_probs.new_full((batch, steps), float("-inf"))
    alpha[:, 0] = 0.0
    ends = []
    for frame in range(frames):
        alpha = emitted[:, frame] + torch.logcumsumexp(alpha - emitted[:, frame], -1)
        alpha = alpha + blank[:, frame]
        ends.append(alpha.gather(-1, num_phones[:, None]).squeeze(-1))
    return -torch.stack(ends, 1).gather(1, num_frames[:, None] - 1).squeeze(1)


def decode(model, letters, seq_lens):
    """The most probable phones of each word, chosen one after the other."""
    encoded = model.encode(letters, seq_lens)
    seq_lens = seq_lens.to(letters.device)
    words = [[] for _ in seq_lens]
    predicted, state = model.predict(torch.full((len(words), 1), BLANK, device=letters.device))
    for frame in range(letters.shape[1]):
        may_emit = frame < seq_lens
        for _ in range(MOST):
            best = model.join(encoded[:, frame], predicted[:, 0]).argmax(-1)
            may_emit = may_emit & (best != BLANK)
            if not may_emit.any():
                break
            for word, phone, emits in zip(words, best.tolist(), may_emit.tolist()):
                if emits:
                    word.append(phone)
            following, new_state = model.predict(best[:, None], state)
            predicted = torch.where(may_emit[:, None, None], following, predicted)
            state = tuple(torch.where(may_emit[None, :, None], new, old) for new, old in zip(new_state, state))
    return words


def get_model(**_):
    return Transducer()


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    letters, phones = extern_data["data"], extern_data["classes"]
    targets = phones.raw_tensor.long()
    log_probs = model(letters.raw_tensor.long(), letters.seq_lens, targets)
    losses = transducer_loss(log_probs, targets, letters.device_seq_lens.long(), phones.device_seq_lens.long())
    context.mark_as_loss(losses, "transducer", use_normalized_loss=True)
    if not context.train_flag:
        decoded = decode(model, letters.raw_tensor.long(), letters.seq_lens)
        distances, lengths = zip(*map(compare, decoded, references_of(extern_data["variants"])))
        distances = torch.tensor(distances)
        context.mark_as_loss(distances, "per", as_error=True, custom_inv_norm_factor=sum(lengths))
        context.mark_as_loss(distances > 0, "wer", as_error=True)


def references_of(variants):
    """The pronunciations of each word."""
    for classes, length in zip(variants.raw_tensor.tolist(), variants.seq_lens.tolist()):
        references = [[]]
        for phone in classes[:length]:
            if phone == BETWEEN:
                references.append([])
            else:
                references[-1].append(phone)
        yield references


def compare(decoded, references):
    """The edit distance to the closest pronunciation in the dictionary, and the length of that one."""
    return min((Levenshtein.distance(decoded, reference), len(reference)) for reference in references)
