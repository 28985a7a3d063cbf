"""An own loop of updates: a GAN, in which two networks with separate optimizers are trained in turn.

python -m hvdtrain configs/cookbook/gan.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/gan.py ++use_horovod 1
"""

import numpy
import torch
from torch import nn
from torch.func import functional_call

import hvdtrain

NOISE = 8
TURNS = 2  # the generator is trained in every second step


class Points(torch.utils.data.Dataset):
    """Points at eight places on a circle, and noise to generate others from: the same numbers on any number of ranks."""

    def __init__(self, size, seed):
        rng = numpy.random.default_rng(seed)
        angles = rng.integers(8, size=size) * numpy.pi / 4
        points = numpy.stack([numpy.cos(angles), numpy.sin(angles)], axis=1) + 0.05 * rng.normal(size=(size, 2))
        self.points, self.noise = points.astype(numpy.float32), rng.normal(size=(size, NOISE)).astype(numpy.float32)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"data": self.points[[index]], "noise": self.noise[[index]]}


train = {"class": Points, "size": 24000, "seed": 1, "seq_ordering": "random"}
dev = {"class": Points, "size": 1000, "seed": 2}
max_seqs_total = 200
max_seqs_dev = 1000
num_epochs = 4
optimizer = [
    {"class": "adam", "betas": (0.5, 0.9), "parameters": ["generator.*"]},
    {"class": "adam", "betas": (0.5, 0.9), "parameters": ["critic.*"], "learning_rate_multiplier": 2.0},
]
learning_rate = 0.001
early_stopping_measure = "dev_loss_distance"
model = "exp/cookbook/gan/model"


def layers(inputs, outputs, size=64):
    hidden = [nn.Linear(inputs, size), nn.LeakyReLU(0.2), nn.Linear(size, size), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(size, outputs))


def get_model(**_):
    return nn.ModuleDict({"generator": layers(NOISE, 2), "critic": layers(2, 1)})


def train_step(*, model, extern_data, **_):
    context, real = hvdtrain.get_run_ctx(), extern_data["data"].raw_tensor[:, 0]
    made = model["generator"](extern_data["noise"].raw_tensor[:, 0])
    if not context.train_flag:
        context.mark_as_loss(energy_distance(real, made), "distance", as_error=True)
    # A loss with the scale 0 is not minimized in this step: the other network's optimizer has no gradients then, and waits.
    # In the first step all losses are minimized, as the ranks agree on them there.
    is_first, turn = context.step == 0, context.step % TURNS
    both = model["critic"](real), model["critic"](made.detach())
    losses = nn.functional.softplus(torch.cat([-both[0], both[1]]))
    context.mark_as_loss(losses, "critic", scale=float(is_first or turn != 0), use_normalized_loss=True)
    fixed = {name: parameter.detach() for name, parameter in model["critic"].named_parameters()}
    losses = nn.functional.softplus(-functional_call(model["critic"], fixed, made))
    context.mark_as_loss(losses, "generator", scale=float(is_first or turn == 0), use_normalized_loss=True)


def energy_distance(real, made):
    """The energy distance of the distributions (Szekely and Rizzo, 2013) is the mean of these numbers of the real points."""
    return 2 * torch.cdist(real, made).mean(1) - torch.cdist(real, real).mean(1) - torch.cdist(made, made).mean(1)
