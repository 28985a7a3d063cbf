"""What makes several ranks compute something else than one rank: a second config, after tests/toy/config.py."""

# ruff: noqa: F821  names of the first config, and `config`
import numpy
import torch
from torch import nn

import hvdtrain

flaws = config.list("flaws", [])
if "data" in flaws:
    generator = numpy.random.default_rng()  # not seeded

    def with_noise(sequence):
        return {**sequence, "data": sequence["data"] + generator.normal(size=sequence["data"].shape).astype("float32")}

    train = {"class": "MapDataset", "dataset": train, "map_seq": with_noise}

if "weights" in flaws:
    weights = torch.Generator()
    weights.seed()

state = torch.Generator().manual_seed(7)


def get_model(**_):
    model = Plain()
    if "weights" in flaws:
        nn.init.normal_(model.last.weight, generator=weights)
    if "batch norm" in flaws:
        model = WithStatistics(dropout=0.0)
    return model


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    data, classes = extern_data["data"], extern_data["classes"]
    frames = data.raw_tensor
    if "dropout" in flaws:
        frames = nn.functional.dropout(frames, 0.3)
    if "state" in flaws:
        frames = frames * (1 + torch.rand(frames.shape, generator=state))
    mask = torch.ones_like(data.mask) if "padding" in flaws else data.mask
    scores = model(frames, data.mask)[mask]
    losses = nn.functional.cross_entropy(scores, classes.raw_tensor[mask].long(), reduction="none")
    if "mean" in flaws:
        losses = losses.mean()
    context.mark_as_loss(losses, "ce", use_normalized_loss="sum" not in flaws)
