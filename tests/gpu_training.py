"""Small trainings inside of the test's process, on the CPU, on a GPU or on the stand-in for one (stand_in_gpu.py)."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from hvdtrain.comm.base import Communicator
from hvdtrain.context import RunContext, get_run_ctx
from hvdtrain.data.padding import pad
from hvdtrain.data.types import Batch
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.torch.learner import build_learner
from hvdtrain.run import train
from hvdtrain.runtime.timer import Timer
from hvdtrain.settings import read_settings

CONFIG = """\
import torch
from torch.nn import functional
import gpu_training
import hvdtrain

model = "{folder}/model"
train = {{"files": "{corpus}/train.hdf", "seq_ordering": "random", "partition_epoch": 2}}
dev = "{corpus}/dev.hdf"
num_epochs = 2
max_seqs = 24
num_threads = 1
log_interval = 0
save_in_background = True  # what is saved are then copies on the CPU
learning_rate = 0.01
optimizer = {{"class": "adam"}}

class Model(torch.nn.Module):  # a bias before BatchNorm would have no gradient but rounding, of which Adam makes steps
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5)

    def forward(self, frames):
        return self.last(self.norm(self.first(frames).transpose(1, 2)).transpose(1, 2).relu())

def get_model(**_):
    torch.manual_seed(1)
    return Model()

def train_step(*, model, extern_data, **_):
    context, data, classes = hvdtrain.get_run_ctx(), extern_data["data"], extern_data["classes"]
    gpu_training.notify(context)
    scores = model(data.raw_tensor)
    losses = functional.cross_entropy(scores.transpose(1, 2), classes.raw_tensor.long(), reduction="none") * data.mask
    count = data.seq_lens.sum()
{losses}
    errors = (scores.argmax(-1) != classes.raw_tensor) & data.mask
    context.mark_as_loss(errors, "fer", as_error=True, custom_inv_norm_factor=count)
    context.mark_as_loss(data.device_seq_lens.float(), "length", as_error=True)
    assert data.device_seq_lens.device == data.raw_tensor.device
"""

SUM = '    context.mark_as_loss(losses, "ce", custom_inv_norm_factor=int(count))'
MEAN = '    context.mark_as_loss(losses, "ce", custom_inv_norm_factor=count, use_normalized_loss=True)'
SEVERAL = MEAN + '\n    context.mark_as_loss(scores.square().mean(-1), "size", scale=0.01, use_normalized_loss=True)'

KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped": (SUM, {"gradient_clip_global_norm": 1.0, "gradient_clip": 0.1}),
    "normalized": (MEAN, {"ema_decay": 0.9, "optimizer": {"class": "adamw", "weight_decay": 0.1}}),
    "accumulated": (SEVERAL, {"accum_grad_multiple_step": 2, "horovod_reduce_type": "param"}),
    "scaled": (
        MEAN,
        {"grad_scaler": {"init_scale": 2.0**118, "growth_interval": 2, "growth_factor": 16}, "mixed_precision": "float16"},
    ),
}


FUSED = {"optimizer": {"class": "adam", "fused": True}}
"""What a GPU gets by itself where updates may be skipped."""

LISTENERS: list[Callable[[RunContext], object]] = []


def notify(context: RunContext) -> None:
    """Called by the config at the beginning of every step."""
    for listener in LISTENERS:
        listener(context)


def trained(
    folder: Path, corpus: Path, losses: str, keys: Mapping[str, Any], listener: Callable[[RunContext], object] = id
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train; return the parameters and BatchNorm's means, and the lines of scores.jsonl.

    Args:
        losses: the lines of train_step that mark them.
        listener: called at the beginning of every step of the training and the evaluations.
    """
    folder.mkdir(exist_ok=True)
    config = folder / "config.py"
    config.write_text(CONFIG.format(folder=folder, corpus=corpus, losses=losses))
    settings = read_settings([config], {name: str(value) for name, value in keys.items()})
    LISTENERS[:] = [listener]
    learner = train(settings).learner
    tensors = dict(learner.state.named_parameters()) | {"means": numpy.asarray(learner.model.norm.running_mean.cpu())}
    return tensors, [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]


def same(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return list(some) == list(others) and all(numpy.array_equal(values, others[name]) for name, values in some.items())


def linear(**_: object) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))


def squares(*, model: torch.nn.Module, extern_data: dict[str, torch.Tensor], **_: object) -> None:
    data = extern_data["data"]
    losses = model(data.raw_tensor)[..., 0].square() * data.mask  # type: ignore[attr-defined]
    get_run_ctx().mark_as_loss(losses, "square", use_normalized_loss=True)


def few_steps(comm: Communicator, may_wait: bool = False) -> list[float]:
    """Some sums of weights after ten steps on a GPU, of which the last eight must not wait."""
    keys = LearnerKeys(get_model=linear, train_step=squares, device="cuda", gradient_clip_global_norm=1.0)
    gradients = GradientExchange(comm, Timer())
    learner = build_learner(keys, gradients, BuildOptions(rank=0, local_rank=0, threads=1, seed=1))
    assert learner.staging is not None
    frames = numpy.random.default_rng(1).normal(size=(10, 6, 20, 4)).astype(numpy.float32)
    for number, values in enumerate(frames):
        batch = Batch({"data": pad(list(values))}, numpy.arange(6))
        sent = learner.staging.send(batch)
        if number == 2 and not may_wait:
            torch.cuda.set_sync_debug_mode("error")
        learner.backward(sent)
        learner.update(0.01)
    torch.cuda.set_sync_debug_mode("default")
    assert learner.meter.take_step_seconds() > 0
    return [float(values.astype(numpy.float64).sum()) for _, values in learner.state.named_parameters()]
