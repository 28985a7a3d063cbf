"""Translation: an encoder and a decoder with attention say English numbers in German, where 21 is "ein und zwanzig".

python -m hvdtrain configs/cookbook/translation.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/translation.py ++use_horovod 1
"""

import numpy
import torch
from torch import nn

import hvdtrain

END, HUNDRED, THOUSAND, AND = 0, 28, 29, 30  # END begins and ends a sequence; 1 to 19 are themselves, 20 to 27 the tens


def spell(number, is_german):
    """The words of a number below 10,000."""
    for unit, word in ((1000, THOUSAND), (100, HUNDRED)):
        if number >= unit:
            return [*spell(number // unit, is_german), word, *spell(number % unit, is_german)]
    if number < 20:
        return [number] if number else []
    tens, ones = 18 + number // 10, spell(number % 10, is_german)
    return [*ones, *([AND] if ones else []), tens] if is_german else [tens, *ones]


numbers = numpy.random.default_rng(1).permutation(numpy.arange(1, 10000)).tolist()
pairs = [{"data": spell(number, False), "target": spell(number, True)} for number in numbers]
train, dev = pairs[:2000], pairs[-200:]
batching = "laplace:.500"
max_seqs_total = 40
num_epochs = 3
optimizer = {"class": "adamw", "weight_decay": 0.01, "betas": (0.9, 0.98)}
learning_rate = 0.005
learning_rate_schedule = {"class": "cosine", "num_warmup_steps": 20, "final": 0.02}
model = "exp/cookbook/translation/model"


class Translator(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.english, self.german = nn.Embedding(AND + 1, size), nn.Embedding(AND + 1, size)
        self.encoder = nn.GRU(size, size // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(size, size, batch_first=True)
        self.attention = nn.MultiheadAttention(size, 4, batch_first=True)
        self.output = nn.Sequential(nn.Linear(2 * size, size), nn.Tanh(), nn.Linear(size, AND + 1))

    def forward(self, source, padded, written, state=None):
        """The scores of the next word after each that is written, and the state after them."""
        encoded, _ = self.encoder(self.english(source))
        hidden, state = self.decoder(self.german(written), state)
        seen, _ = self.attention(hidden, encoded, encoded, key_padding_mask=padded, need_weights=False)
        return self.output(torch.cat([hidden, seen], dim=-1)), state


def get_model(**_):
    return Translator()


def train_step(*, model, extern_data, **_):
    context, source, target = hvdtrain.get_run_ctx(), extern_data["data"], extern_data["target"]
    words, padded = target.raw_tensor.long(), ~source.mask
    end = words.new_full((len(words), 1), END)
    scores, _ = model(source.raw_tensor.long(), padded, torch.cat([end, words], dim=1))
    is_real = torch.arange(scores.shape[1], device=scores.device) <= target.device_seq_lens[:, None]  # the end, too
    losses = nn.functional.cross_entropy(scores[is_real], torch.cat([words, end], dim=1)[is_real], reduction="none")
    context.mark_as_loss(losses, "ce", use_normalized_loss=True)
    if not context.train_flag:
        is_wrong = (translate(model, source.raw_tensor.long(), padded, words.shape[1]) != words).any(1)
        context.mark_as_loss(is_wrong, "wrong", as_error=True)


def translate(model, source, padded, longest):
    """The best next word, again and again, up to the end."""
    written, state, goes_on = [torch.full_like(source[:, :1], END)], None, True
    for _ in range(longest):
        scores, state = model(source, padded, written[-1], state)
        goes_on = goes_on & (scores.argmax(-1) != END)
        written.append(scores.argmax(-1) * goes_on)
    return torch.cat(written[1:], dim=1)
