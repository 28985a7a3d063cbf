"""What a training asks of a GPU, with a stand-in (stand_in_gpu.py): no step waits for it, and the results are the CPU's."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy
import pytest
import stand_in_gpu
import torch
from gpu_training import FUSED, KEYS, SUM, linear, same, squares, trained
from learners import batch_of, learner_of

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import RunContext, get_run_ctx
from hvdtrain.data.padding import pad
from hvdtrain.data.types import Batch
from hvdtrain.errors import TrainingError
from hvdtrain.learner.frameworks import SAVERS
from hvdtrain.learner.precision import GradientCheck, LossScale, ScaleOptions
from hvdtrain.learner.torch import tensors
from hvdtrain.learner.torch.optimizer import make_optimizer
from hvdtrain.learner.torch.tensors import TorchData
from hvdtrain.learner.torch.update import DeviceSkips, skips_by_itself
from hvdtrain.plugins.background.writer import BackgroundWriter


@pytest.fixture(autouse=True, scope="module")
def one_writer() -> Iterator[None]:
    """All trainings have their models written by one process: each would import PyTorch."""
    writer = BackgroundWriter()
    writer._start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SAVERS._loaded, "torch", lambda _: writer)
        patch.setattr(writer, "close", lambda: None)
        yield
    writer.close()


class Counts:
    """The number of waits before every step. Attributes: phases: by epoch, and whether it is training."""

    def __init__(self, gpu: stand_in_gpu.StandIn) -> None:
        self._gpu = gpu
        self.phases: dict[tuple[int, bool], list[int]] = {}

    def __call__(self, context: RunContext) -> None:
        self.phases.setdefault((context.epoch, context.train_flag), []).append(len(self._gpu.waits))

    def within(self) -> list[int]:
        """The waits in each training and each evaluation."""
        return [counts[-1] - counts[0] for counts in self.phases.values()]


@pytest.mark.parametrize("name", KEYS)
def test_a_training_waits_for_no_gpu_between_steps_and_computes_the_same(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, keys = KEYS[name]
    monkeypatch.setattr("hvdtrain.learner.torch.learner.autocast_of", lambda *_: nullcontext)  # scaled, but in float32
    on_cpu, cpu_lines = trained(tmp_path / "cpu", corpus, losses, keys if name != "scaled" else keys | FUSED)
    with stand_in_gpu.gpu(monkeypatch) as gpu:
        counts = Counts(gpu)
        on_gpu, gpu_lines = trained(tmp_path / "gpu", corpus, losses, keys, counts)
    for line, other in zip(cpu_lines, gpu_lines, strict=True):
        assert line["scores"] == other["scores"]
        assert line.get("loss_scale") == other.get("loss_scale")
    assert same(on_cpu, on_gpu)
    # Every step has a record, with the gradients' norm of an update of which it has arrived: no step waits for it.
    records = [
        [json.loads(line) for line in (tmp_path / device / "steps.jsonl").read_text().splitlines()] for device in ("cpu", "gpu")
    ]
    assert list(map(len, records)) == [10, 10]
    norms = [[record["gradient_norm"] for record in of_one if record["gradient_norm"] is not None] for of_one in records]
    assert list(map(len, norms)) == ([10, 10] if name == "clipped" else [0, 0])
    assert set(norms[1]) <= set(norms[0])
    assert list(map(len, counts.phases.values())) == [5, 5, 5, 5]
    # The host decides on the first update if some may be skipped: the optimizer creates its state then.
    assert counts.within() == [int(name == "scaled"), 0, 0, 0], gpu.waits
    # What was waited for in steps had been computed a step before: an event at the end of an update has 79 operations behind it.
    assert sum(late < 40 for late in gpu.late) <= 2 * 4, gpu.late


def test_a_training_goes_on_on_a_gpu_with_the_optimizers_step_on_the_cpu(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step on the GPU would be read from there in every update, once for each parameter."""
    whole, _ = trained(tmp_path / "whole", corpus, *KEYS["clipped"])
    trained(tmp_path / "parts", corpus, KEYS["clipped"][0], KEYS["clipped"][1] | {"num_epochs": 1})
    with stand_in_gpu.gpu(monkeypatch) as gpu:
        counts = Counts(gpu)
        continued, _ = trained(tmp_path / "parts", corpus, *KEYS["clipped"], counts)
    assert list(counts.phases) == [(2, True), (2, False)]
    assert same(whole, continued)
    assert counts.within() == [0, 0], gpu.waits


def test_a_batch_that_does_not_fit_beside_the_step_before_is_sent_with_its_own(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, lines = trained(tmp_path / "cpu", corpus, SUM, {})
    sent: list[bool] = []  # by batch of the first epoch, whether it fit
    send, send_ahead = tensors._send, tensors.CudaStaging.send

    def run_out(one: tensors.Data, device: torch.device) -> tensors.Data:
        if ahead and len(sent) % 3 == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return send(one, device)

    def noted(staging: tensors.CudaStaging, batch: Batch) -> Batch:
        ahead.append(1)
        found = send_ahead(staging, batch)
        ahead.clear()
        sent.append(isinstance(found, tensors.SentBatch))
        return found

    ahead: list[int] = []
    monkeypatch.setattr(tensors, "_send", run_out)
    monkeypatch.setattr(tensors.CudaStaging, "send", noted)
    with stand_in_gpu.gpu(monkeypatch):
        found, gpu_lines = trained(tmp_path / "gpu", corpus, SUM, {})
    assert sent[:4] == [True, False, True, True]
    assert same(expected, found)
    assert [line["scores"] for line in lines] == [line["scores"] for line in gpu_lines]


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
    assert "2 updates were skipped, got others in step 9 of the training, for first.weight, norm.weight, " in str(on_cpu.value)
    assert str(on_gpu.value) == str(on_cpu.value)
    assert not (tmp_path / "gpu" / "model.002.pt").exists()  # step 9 is the epoch's last: `settle` raises the error


def test_a_step_starts_few_kernels_more_than_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a loss needs: its sum for the report, its number of elements, and their quotient."""

    def hvdtrains() -> None:
        learner.backward(learner.staging.send(batch))
        learner.update(0.1)

    def loops() -> None:
        data = batch.data["data"]
        frames, lengths = (torch.from_numpy(one).to("cuda:0") for one in (data.values, data.seq_lens))
        mask = torch.arange(frames.shape[1], device="cuda:0") < lengths[:, None]
        ((plain(frames)[..., 0].square() * mask).sum() / mask.numel()).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def kernels_of(step: Callable[[], None]) -> int:
        step()  # the optimizer's state
        before = gpu.kernels
        step()
        return gpu.kernels - before

    batch = batch_of(numpy.ones((6, 20, 4), numpy.float32))
    with stand_in_gpu.gpu(monkeypatch) as gpu:
        learner = learner_of(linear, squares, optimizer="adam", gradient_clip_global_norm=1.0)
        plain = linear().to("cuda:0")
        optimizer = torch.optim.Adam(plain.parameters())
        assert kernels_of(hvdtrains) - kernels_of(loops) <= 8


def test_batch_norm_over_the_ranks_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_model(**_: object) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

    def train_step(*, model: torch.nn.Module, extern_data: dict[str, TorchData], **_: object) -> None:
        data = extern_data["data"]
        get_run_ctx().mark_as_loss(model(data.raw_tensor[:, 0]).square(), "square")

    batch = Batch({"data": pad(list(numpy.ones((4, 2, 3), numpy.float32)))}, numpy.arange(4))
    with stand_in_gpu.gpu(monkeypatch) as gpu:
        options = {"batch_norm": SingleCommunicator()}
        learner = learner_of(get_model, train_step, options=options, optimizer="adamw", sync_batch_norm=True)
        gpu.waits.clear()
        assert learner.staging is not None
        for _ in range(3):
            learner.backward(learner.staging.send(batch))
            learner.update(0.1)
        assert gpu.waits == []
        assert gpu.kernels > 100


def test_which_optimizers_are_fused_by_themselves() -> None:
    def skips(spec: object, fused: bool = True) -> bool:
        return skips_by_itself(make_optimizer(spec, torch.nn.Linear(2, 1), fused=fused))

    assert [skips({"class": name}) for name in ("adam", "adamw", "sgd", "radam")] == [True, True, True, False]
    assert skips({"class": "adamw", "weight_decay": 0.1})  # two groups
    assert not skips({"class": "adam", "foreach": True})
    assert not skips({"class": "adam"}, fused=False)
    assert skips({"class": "adam", "fused": True}, fused=False)
    assert not skips(lambda parameters: torch.optim.Adam(parameters))


def test_a_loss_scale_on_the_device_is_the_hosts() -> None:
    options = ScaleOptions(init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2)
    expected, late = LossScale(options), LossScale(options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], fused=True)
    skips = DeviceSkips(GradientCheck(None, late, same_on_all_ranks=True), torch.device("cpu"))
    assert skips_by_itself(optimizer)
    for step, finite in enumerate([True, True, False, True, True, True, True, False, False, True]):
        before = expected.state()
        expected.update(finite)
        skips.decide(optimizer, torch.tensor([True, finite]), ["a", "b"], step)
        assert skips.loss_factor is not None
        assert skips.loss_factor.item() == numpy.float32(expected.scale)
        assert late.state() == before  # one update late
    skips.flush()
    assert late.state() == expected.state()
