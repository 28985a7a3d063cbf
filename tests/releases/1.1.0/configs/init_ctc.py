"""Speech recognition with CTC: a Transformer encoder learns to write the labels of an utterance.

    python -m hvdtrain init_ctc.py                                                trains in one process
    python -m hvdtrain init_ctc.py ++ngpu 2                                       on two ranks of this host
    mpirun -np 2 --bind-to none python -m hvdtrain init_ctc.py ++use_horovod 1    on two Horovod ranks
    python -m hvdtrain init_ctc.py --find-learning-rate                           suggests a learning rate
    python -m hvdtrain init_ctc.py ++task forward ++output_file labels.hdf        writes what it recognizes in `forward_data`

The same command continues a training that was stopped. ++KEY VALUE overrides any key: ++num_epochs 5.
"""

import numpy
import torch
from torch import nn

import hvdtrain

FEATURES, LABELS, BLANK = 16, 20, 0  # the labels are 1 to LABELS


class Utterances(torch.utils.data.Dataset):
    """Made-up data, in place of yours: an item is a dict of arrays, with time on the first axis."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed
        self.sounds = numpy.random.default_rng(0).normal(size=(LABELS + 1, FEATURES))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = numpy.random.default_rng([self.seed, index])
        labels = generator.integers(1, LABELS + 1, size=generator.integers(3, 9))
        frames = self.sounds[numpy.repeat(labels, generator.integers(8, 13, size=len(labels)))]
        frames = frames + generator.normal(scale=0.5, size=frames.shape)
        return {"data": frames.astype(numpy.float32), "labels": labels.astype(numpy.int32)}


train = {"class": Utterances, "size": 1200, "seed": 1, "seq_ordering": "laplace:.200"}  # random, in bins of similar lengths
dev = {"class": Utterances, "size": 100, "seed": 2}  # evaluated after every epoch
forward_data = {"class": Utterances, "size": 20, "seed": 3}

batch_size = {"data": 2000}  # frames per rank and step, with padding
num_epochs = 5
optimizer = {"class": "adamw", "weight_decay": 0.01, "betas": (0.9, 0.98)}
learning_rate = 0.002
learning_rate_schedule = {"class": "cosine", "num_warmup_epochs": 1, "final": 0.01}
gradient_clip_global_norm = 5.0
ema_decay = 0.99  # evaluates and saves an average of the weights; 0.999 or more for a training of many thousands of steps
early_stopping_measure = "dev_loss_label_errors"  # the score by which epochs are compared
cleanup_old_models = {"keep_last_n": 2, "keep_best_n": 1, "keep": []}
model = "exp/init_ctc/model"  # checkpoints: exp/init_ctc/model.001.pt, ...

# average_checkpoints = {"best": 5}  # at the end, writes and evaluates the mean of the five best models, too
# mixed_precision = "bfloat16"  # on a GPU
# accum_grad_multiple_step = 2  # updates with batches of twice the size


class Encoder(nn.Module):
    def __init__(self, size=64, layers=2):
        super().__init__()
        self.subsampling = nn.Conv1d(FEATURES, size, kernel_size=3, stride=2, padding=1)
        self.positions = nn.Conv1d(size, size, kernel_size=15, padding=7, groups=size)  # as wav2vec 2.0 has them
        layer = nn.TransformerEncoderLayer(size, 4, 4 * size, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(size), enable_nested_tensor=False)
        self.output = nn.Linear(size, LABELS + 1)

    def forward(self, frames, seq_lens):
        """Log-probabilities of the labels and the blank, (batch, time / 2, LABELS + 1), and the lengths."""
        encoded = self.subsampling(frames.transpose(1, 2)).relu()
        seq_lens = (seq_lens + 1) // 2
        padded = torch.arange(encoded.shape[2], device=frames.device) >= seq_lens[:, None]
        encoded = encoded.masked_fill(padded[:, None], 0.0)
        encoded = (encoded + self.positions(encoded)).transpose(1, 2)
        return self.output(self.layers(encoded, src_key_padding_mask=padded)).log_softmax(-1), seq_lens


def get_model(**_):
    return Encoder()


def mask_some(frames, mask):
    """SpecAugment (Park et al., 2019): sets a stretch of time and a band of features to zero in every sequence."""
    frames = frames.clone()
    for sequence, length in zip(frames, mask.sum(1).tolist()):
        begin, width = torch.randint(length, (1,)).item(), torch.randint(max(length // 10, 1), (1,)).item()
        sequence[begin : begin + width] = 0.0
        band = torch.randint(FEATURES, (1,)).item()
        sequence[:, band : band + 2] = 0.0
    return frames


def train_step(*, model, extern_data, **_):
    """The losses of a batch: one number per sequence, and the number of labels by which hvdtrain divides their sum."""
    data, labels = extern_data["data"], extern_data["labels"]
    context = hvdtrain.get_run_ctx()
    frames = mask_some(data.raw_tensor, data.mask) if context.train_flag else data.raw_tensor
    scores, seq_lens = model(frames, data.device_seq_lens)
    targets, num_labels = labels.raw_tensor.long(), labels.device_seq_lens
    losses = nn.functional.ctc_loss(
        scores.transpose(0, 1).float(), targets, seq_lens, num_labels, blank=BLANK, reduction="none", zero_infinity=True
    )
    context.mark_as_loss(losses, "ctc", custom_inv_norm_factor=num_labels.sum(), use_normalized_loss=True)
    if not context.train_flag:
        found = recognize(scores, seq_lens)
        pairs = zip(found, targets.tolist(), num_labels.tolist())
        errors = [edit_distance(hypothesis, reference[:length]) for hypothesis, reference, length in pairs]
        context.mark_as_loss(torch.tensor(errors), "label_errors", as_error=True, custom_inv_norm_factor=num_labels.sum())


def recognize(scores, seq_lens):
    """The labels of each sequence: the best path without repetitions and blanks."""
    found = []
    for path, length in zip(scores.argmax(-1), seq_lens.tolist()):
        labels = torch.unique_consecutive(path[:length]).tolist()
        found.append([label for label in labels if label != BLANK])
    return found


def edit_distance(one, other):
    row = list(range(len(other) + 1))
    for place, label in enumerate(one, start=1):
        before, row[0] = row[0], place
        for column, reference in enumerate(other, start=1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (label != reference))
    return row[-1]


def forward_step(*, model, extern_data, **_):
    data = extern_data["data"]
    found = recognize(*model(data.raw_tensor, data.device_seq_lens))
    lengths = torch.tensor([len(labels) for labels in found])
    padded = nn.utils.rnn.pad_sequence([torch.tensor(labels, dtype=torch.int32) for labels in found], batch_first=True)
    hvdtrain.get_run_ctx().mark_as_default_output(padded, seq_lens=lengths)
