"""A language model: a Transformer decoder learns to predict the next token.

    python -m hvdtrain init_lm.py                                                trains in one process
    python -m hvdtrain init_lm.py ++ngpu 2                                       on two ranks of this host
    mpirun -np 2 --bind-to none python -m hvdtrain init_lm.py ++use_horovod 1    on two Horovod ranks
    python -m hvdtrain init_lm.py --find-learning-rate                           suggests a learning rate

The same command continues a training that was stopped. ++KEY VALUE overrides any key: ++num_epochs 5.
"""

import numpy
import torch
from torch import nn

import hvdtrain

TOKENS, START = 50, 0  # token 0 stands before the first and after the last one of a text


class Texts(torch.utils.data.Dataset):
    """Made-up data, in place of yours: an item is a dict of arrays, here a text as the numbers of its tokens."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed
        self.next = numpy.random.default_rng(0).integers(1, TOKENS, size=(TOKENS, TOKENS, 2))  # two may follow each pair

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = numpy.random.default_rng([self.seed, index])
        text = [START, int(generator.integers(1, TOKENS))]
        for _ in range(generator.integers(10, 40)):
            text.append(int(self.next[text[-1], 0, generator.integers(2)]))
        return {"data": numpy.array(text[1:], numpy.int32)}


train = {"class": Texts, "size": 2000, "seed": 1, "seq_ordering": "laplace:.500"}  # random, in bins of similar lengths
dev = {"class": Texts, "size": 200, "seed": 2}  # evaluated after every epoch

batch_size = 1000  # tokens per rank and step, with padding
num_epochs = 5
optimizer = {  # Muon for the matrices, AdamW for embeddings, norms and biases
    "class": "muon",
    "weight_decay": 0.1,
    "others": {"class": "adamw", "weight_decay": 0.1, "betas": (0.9, 0.95)},
}
learning_rate = 0.005
learning_rate_schedule = {"class": "cosine", "num_warmup_epochs": 0.5, "final": 0.1}
gradient_clip_global_norm = 1.0
ema_decay = 0.99  # evaluates and saves an average of the weights; 0.999 or more for a training of many thousands of steps
early_stopping_measure = "dev_loss_ce"  # the score by which epochs are compared
cleanup_old_models = {"keep_last_n": 2, "keep_best_n": 1, "keep": []}
model = "exp/init_lm/model"  # checkpoints: exp/init_lm/model.001.pt, ...

# average_checkpoints = {"best": 5}  # at the end, writes and evaluates the mean of the five best models, too
# mixed_precision = "bfloat16"  # on a GPU
# torch_compile = True  # faster steps after a minute of compiling
# save_interval_minutes = 30  # checkpoints within epochs, if an epoch takes hours


class Block(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.query_key_value = nn.Linear(size, 3 * size, bias=False)
        self.attended = nn.Linear(size, size, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, inputs):
        parts = self.query_key_value(self.attention_norm(inputs)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        # Padding is at the end, so that no token sees it.
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.attended(attended.transpose(1, 2).flatten(2))
        return inputs + self.feed_forward(self.feed_forward_norm(inputs))


class Decoder(nn.Module):
    def __init__(self, size=64, layers=2, heads=4, longest=512):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, size), nn.Embedding(longest, size)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*[Block(size, heads) for _ in range(layers)])
        self.norm = nn.RMSNorm(size)

    def forward(self, tokens):
        """The scores of the next token after each: (batch, time, TOKENS)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.positions(positions))
        return self.norm(hidden) @ self.tokens.weight.T  # the same matrix as that of the embedding


def get_model(**_):
    return Decoder()


def train_step(*, model, extern_data, **_):
    """The losses of a batch: one number per token and text end, so that N ranks compute what one rank does."""
    data = extern_data["data"]
    tokens = data.raw_tensor.long()
    start = tokens.new_full((len(tokens), 1), START)
    inputs, targets = torch.cat([start, tokens], dim=1), torch.cat([tokens, start], dim=1)
    is_real = torch.arange(inputs.shape[1], device=tokens.device) <= data.device_seq_lens[:, None]  # the end of the text, too
    scores, targets = model(inputs)[is_real], targets[is_real]  # START is 0, as is the padding after the text
    context = hvdtrain.get_run_ctx()
    context.mark_as_loss(nn.functional.cross_entropy(scores, targets, reduction="none"), "ce", use_normalized_loss=True)
    context.mark_as_loss(scores.argmax(-1) != targets, "error", as_error=True)  # exp of dev_loss_ce is the perplexity
