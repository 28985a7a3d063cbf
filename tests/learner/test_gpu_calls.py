"""What a training asks of a GPU, with a stand-in (stand_in_gpu.py): no step waits for it, and the results are the CPU's."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import stand_in_gpu
import torch

from hvdtrain.errors import TrainingError
from hvdtrain.learner.precision import GradientCheck, LossScale, ScaleOptions
from hvdtrain.learner.torch.skipping import DeviceSkips, skips_by_itself
from hvdtrain.run import train
from hvdtrain.settings import read_settings

CONFIG = """\
import torch
from torch.nn import functional
import hvdtrain
import stand_in_gpu

model = "{folder}/model"
train = {{"files": "{corpus}/train.hdf", "seq_ordering": "random"}}
dev = "{corpus}/dev.hdf"
num_epochs = 2
max_seqs = 24
num_threads = 1
log_interval = 0
save_in_background = True  # what is saved are then copies on the CPU
learning_rate = 0.01
optimizer = {{"class": "adam"}}
marks = []

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5)

    def forward(self, frames):
        return self.last(self.norm(self.first(frames).transpose(1, 2)).transpose(1, 2).relu())

def get_model(**_):
    torch.manual_seed(1)
    return Model()

def train_step(*, model, extern_data, **_):
    context, data, classes = hvdtrain.get_run_ctx(), extern_data["data"], extern_data["classes"]
    if stand_in_gpu.StandIn.current:
        gpu = stand_in_gpu.StandIn.current
        marks.append((context.epoch, context.train_flag, len(gpu.waits)))
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


def trained(folder: Path, corpus: Path, losses: str, keys: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], Any]:
    """Train; return the parameters and BatchNorm's means, the scores and loss scales by epoch, and the config's marks."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.py"
    config.write_text(CONFIG.format(folder=folder, corpus=corpus, losses=losses))
    settings = read_settings([config], {name: str(value) for name, value in keys.items()})
    learner = train(settings)
    tensors = dict(learner.state.named_parameters()) | {"means": numpy.asarray(learner.model.norm.running_mean.cpu())}
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    function: Any = settings.learner.train_step
    return tensors, [json.dumps([line["scores"], line.get("loss_scale")]) for line in lines], function.__globals__["marks"]


def same(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return list(some) == list(others) and all(numpy.array_equal(values, others[name]) for name, values in some.items())


def waits_within(marks: list[tuple[int, bool, int]], first: int = 0) -> list[int]:
    """The number of waits in each training and each evaluation, from the given step of the first training on."""
    phases: dict[tuple[int, bool], list[int]] = {}
    for epoch, flag, waits in marks[first:]:
        phases.setdefault((epoch, flag), []).append(waits)
    return [counts[-1] - counts[0] for counts in phases.values()]


@pytest.mark.parametrize("name", KEYS)
def test_a_training_waits_for_no_gpu_between_steps_and_computes_the_same(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, keys = KEYS[name]
    monkeypatch.setattr("hvdtrain.learner.torch.build.autocast_of", lambda *_: nullcontext)  # scaled, but in float32
    on_cpu, scores, _ = trained(tmp_path / "cpu", corpus, losses, keys if name != "scaled" else keys | FUSED)
    with stand_in_gpu.gpu(monkeypatch) as gpu:
        on_gpu, gpu_scores, marks = trained(tmp_path / "gpu", corpus, losses, keys)
    assert scores == gpu_scores
    assert same(on_cpu, on_gpu)
    assert len(marks) == 2 * (10 + 5)
    # The host decides on the first update if some may be skipped: the optimizer creates its state then.
    assert waits_within(marks, first=name == "scaled") == [0] * 4, gpu.waits
    # What was waited for in steps had been computed a step before: an event at the end of an update has 79 operations behind it.
    assert sum(late < 40 for late in gpu.late) <= 2 * 4, gpu.late


def test_a_training_goes_on_on_a_gpu_with_the_optimizers_step_on_the_cpu(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step on the GPU would be read from there in every update, once for each parameter."""
    whole, _, _ = trained(tmp_path / "whole", corpus, *KEYS["clipped"])
    trained(tmp_path / "parts", corpus, KEYS["clipped"][0], KEYS["clipped"][1] | {"num_epochs": 1})
    with stand_in_gpu.gpu(monkeypatch) as gpu:
        continued, _, marks = trained(tmp_path / "parts", corpus, *KEYS["clipped"])
    assert {epoch for epoch, _, _ in marks} == {2}
    assert same(whole, continued)
    assert waits_within(marks) == [0] * 2, gpu.waits


def test_a_broken_loss_is_found_when_it_arrives(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = '    losses = losses * (float("nan") if context.step == 3 else 1.0)\n' + SUM
    with stand_in_gpu.gpu(monkeypatch), pytest.raises(TrainingError, match=r"ce = nan in step 3 of epoch 1, sequences seq-"):
        trained(tmp_path / "gpu", corpus, broken, {"num_epochs": 3})
    assert not (tmp_path / "gpu" / "model.001.pt").exists()


def test_the_names_of_broken_gradients_are_known_though_they_are_gone(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = '    losses = losses * (float("inf") if context.step in (3, 7, 8, 9) else 1.0)\n' + SUM
    keys = {"num_allowed_consec_invalid_gradient_steps": 2, "stop_on_nonfinite_train_score": False}
    with pytest.raises(TrainingError) as on_cpu:
        trained(tmp_path / "cpu", corpus, broken, keys)
    with stand_in_gpu.gpu(monkeypatch), pytest.raises(TrainingError) as on_gpu:
        trained(tmp_path / "gpu", corpus, broken, keys)
    assert "2 updates were skipped, got others in step 9 of the training, for first.weight, first.bias, " in str(on_cpu.value)
    assert str(on_gpu.value) == str(on_cpu.value)
    assert not (tmp_path / "gpu" / "model.001.pt").exists()  # step 9 is the epoch's last: `settle` raises the error


def test_a_loss_scale_on_the_device_is_the_hosts() -> None:
    options = ScaleOptions(init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2)
    expected, late = LossScale(options), LossScale(options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], fused=True)
    skips = DeviceSkips(GradientCheck(None, late, same_on_all_ranks=True), late, torch.device("cpu"))
    assert skips_by_itself(optimizer)
    for step, finite in enumerate([True, True, False, True, True, True, True, False, False, True]):
        before = expected.state()
        expected.update(finite)
        skips.decide(optimizer, torch.tensor([True, finite]), ["a", "b"], step)
        assert skips.loss_factor is not None
        assert skips.loss_factor.item() == numpy.float32(expected.scale)
        assert late.state() == before  # one update late
    skips.settle()
    assert late.state() == expected.state()
