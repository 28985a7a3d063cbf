"""On a real GPU: the same results as on the CPU, no call that waits for it, and what only a GPU has. `make test-gpu`.

Skipped where there is none; test_gpu_calls.py tests the same with a stand-in.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from gpu_training import KEYS, MEAN, SUM, trained

from hvdtrain.comm.base import Communicator, SingleCommunicator
from hvdtrain.comm.launchers import Launch
from hvdtrain.context import RunContext, get_run_ctx
from hvdtrain.data.feed import ReadAhead
from hvdtrain.data.padding import pad
from hvdtrain.data.types import Batch
from hvdtrain.learner.base import LearnerKeys
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.torch.learner import build_learner
from hvdtrain.learner.torch.tensors import CudaStaging, await_copy, extern_data_of
from hvdtrain.runtime.timer import Timer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this host"),
]

FIRST, LAST = 3, 23
"""The steps between which no call may wait. Before them, kernels are loaded and memory is allocated."""


@pytest.fixture
def _waiting_allowed() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def forbid_waiting(context: RunContext) -> None:
    """Let PyTorch raise an error where the host waits for the GPU, in twenty steps of the first epoch."""
    if context.train_flag and context.step in (FIRST, LAST):
        torch.cuda.set_sync_debug_mode("error" if context.step == FIRST else "default")


@pytest.mark.usefixtures("_waiting_allowed")
@pytest.mark.parametrize("name", KEYS)
def test_twenty_steps_do_not_wait_and_the_results_are_the_cpus(name: str, corpus: Path, tmp_path: Path) -> None:
    losses, keys = KEYS[name]
    keys = {**keys, "max_seqs": 8, "num_epochs": 1, "log_interval": 0.01}
    if name == "scaled":  # the first update fits into float16, some that follow do not
        keys["grad_scaler"] = {"init_scale": 256.0, "growth_interval": 4, "growth_factor": 16.0}
    on_gpu, gpu_lines = trained(tmp_path / "gpu", corpus, losses, {**keys, "device": "cuda"}, forbid_waiting)
    assert 0 < gpu_lines[0]["computing"] <= 1.01
    if name == "scaled":
        assert gpu_lines[0]["loss_scale"] > 0
        return  # where float16 overflows differs
    on_cpu, cpu_lines = trained(tmp_path / "cpu", corpus, losses, {**keys, "device": "cpu"})
    assert gpu_lines[0]["scores"] == pytest.approx(cpu_lines[0]["scores"], rel=1e-2)
    # The gradient of a bias before BatchNorm is zero but for rounding, and Adam makes any gradient large.
    for parameter in on_cpu.keys() - {"first.bias", "means"}:
        assert on_gpu[parameter] == pytest.approx(on_cpu[parameter], rel=1e-2, abs=1e-3), parameter


def test_batches_that_were_sent_ahead_are_those_that_were_read() -> None:
    device = torch.device("cuda:0")
    generator = numpy.random.default_rng(1)

    def batch(number: int) -> Batch:
        lengths = generator.integers(1, 50, 8)
        data = {
            "data": pad([generator.normal(size=(length, 80)).astype(numpy.float32) for length in lengths]),
            "classes": pad([generator.integers(0, 60_000, length).astype(numpy.uint16) for length in lengths]),
            "text": pad([numpy.array(["a word"] * length, dtype=object) for length in lengths]),
        }
        return Batch(data, numpy.arange(8) + number)

    read = [batch(number) for number in range(50)]
    staging = CudaStaging(device)
    with ReadAhead(map(staging.pin, read), begin=staging.send) as batches:
        for expected, sent in zip(read, batches, strict=True):
            await_copy(sent)
            tensors = extern_data_of(sent, device)
            torch.full((1 << 22,), 1.0, device=device).cumsum(0)  # keeps the GPU busy while the next batch is copied
            assert sent.indices.tolist() == expected.indices.tolist()
            for key, padded in expected.data.items():
                assert tensors[key].seq_lens.device.type == "cpu"
                assert tensors[key].device_seq_lens.tolist() == tensors[key].seq_lens.tolist() == padded.seq_lens.tolist()
                if key == "text":
                    assert (tensors[key].raw_tensor == padded.values).all()
                else:
                    assert tensors[key].raw_tensor.device == device
                    assert (tensors[key].raw_tensor.cpu().numpy() == padded.values).all()
                assert (sent.data[key].values == padded.values).all()


def linear(**_: object) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))


def squares(*, model: torch.nn.Module, extern_data: dict[str, torch.Tensor], **_: object) -> None:
    data = extern_data["data"]
    losses = model(data.raw_tensor)[..., 0].square() * data.mask  # type: ignore[attr-defined]
    get_run_ctx().mark_as_loss(losses, "square", use_normalized_loss=True)


@pytest.mark.usefixtures("_waiting_allowed")
def test_nccl_in_one_process() -> None:
    """The collectives of a job of size 1 over NCCL: equal results, and no step waits."""
    from hvdtrain.comm.torch_dist import TorchCommunicator

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    comm = TorchCommunicator(Launch(None))
    try:
        assert few_steps(comm) == pytest.approx(few_steps(SingleCommunicator()), rel=1e-6)
    finally:
        comm.close()


def few_steps(comm: Communicator) -> list[float]:
    """Some sums of weights after ten steps, of which the last eight must not wait."""
    keys = LearnerKeys(get_model=linear, train_step=squares, device="cuda", gradient_clip_global_norm=1.0)
    gradients = GradientExchange(comm, Timer())
    learner = build_learner(keys, gradients, BuildOptions(rank=0, local_rank=0, threads=1, seed=1))
    assert learner.staging is not None
    frames = numpy.random.default_rng(1).normal(size=(10, 6, 20, 4)).astype(numpy.float32)
    for number, values in enumerate(frames):
        batch = Batch({"data": pad(list(values))}, numpy.arange(6))
        sent = learner.staging.send(batch)
        if number == 2:
            torch.cuda.set_sync_debug_mode("error")
        learner.backward(sent)
        learner.update(0.01)
    torch.cuda.set_sync_debug_mode("default")
    assert learner.meter.take_step_seconds() > 0
    return [float(values.astype(numpy.float64).sum()) for _, values in learner.state.named_parameters()]


def test_autocast(corpus: Path, tmp_path: Path) -> None:
    found: list[float] = []
    for precision in (None, "bfloat16"):
        keys = {"max_seqs": 8, "num_epochs": 1, "device": "cuda", "mixed_precision": precision}
        where = "\n    assert scores.dtype == (torch.bfloat16 if hvdtrain_precision else torch.float32)"
        losses = MEAN + where.replace("hvdtrain_precision", str(precision is not None))
        found.append(trained(tmp_path / str(precision), corpus, losses, keys)[1][0]["scores"]["train_loss_ce"])
    assert found[1] == pytest.approx(found[0], rel=0.05)
    assert found[1] != found[0]


def test_torch_compile(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = []
    for compiles in (False, True):
        keys = {"max_seqs": 8, "num_epochs": 1, "device": "cuda", "torch_compile": compiles}
        found.append(trained(tmp_path / str(compiles), corpus, SUM, keys)[1][0]["scores"])
    assert found[1] == pytest.approx(found[0], rel=1e-2)
