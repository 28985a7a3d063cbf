"""On a real GPU: the same results as on the CPU, no call that waits for it, and what only a GPU has. `make test-gpu`.

Skipped where there is none; test_gpu_calls.py tests the same with a stand-in.
"""

import gc
import json
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from elastic import CHILDREN, EPOCH, command, keys_of, write_config
from gpu_training import KEYS, MEAN, SUM, few_steps, same, trained
from launching import ROOT, TOY, launch, torchrun
from trainings import assert_alike, saved_model

from hvdtrain.comm.launchers import Place
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import RunContext
from hvdtrain.data.padding import pad
from hvdtrain.data.read_ahead import ReadAhead
from hvdtrain.data.types import Batch
from hvdtrain.learner.torch.tensors import CudaStaging, await_copy, extern_data_of
from hvdtrain.plugins.trace.records import trained_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this host"),
]

A_FEW_FRAMES = 0.005
"""In an error rate of some 600 frames: where two classes are about as likely, rounding decides."""

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
    assert gpu_lines[0]["scores"] == pytest.approx(cpu_lines[0]["scores"], rel=1e-2, abs=A_FEW_FRAMES)
    for parameter, values in on_cpu.items():
        assert on_gpu[parameter] == pytest.approx(values, rel=1e-2, abs=1e-3), parameter


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


@pytest.mark.usefixtures("_waiting_allowed")
def test_nccl_in_one_process() -> None:
    """The collectives of a job of size 1 over NCCL: equal results, and no step waits."""
    from hvdtrain.comm.torch_dist import TorchCommunicator

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    comm = TorchCommunicator(Place(None), timedelta(seconds=60))
    try:
        assert few_steps(comm) == pytest.approx(few_steps(SingleCommunicator()), rel=1e-6)
    finally:
        comm.close()


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
    assert found[1] == pytest.approx(found[0], rel=1e-2, abs=A_FEW_FRAMES)


def test_horovod_in_one_process() -> None:
    """The same over Horovod, on a stream of its own: its `synchronize` waits, and the results are the same."""
    hvd = pytest.importorskip("horovod.torch")
    if not hvd.nccl_built():
        pytest.skip("Horovod was built without NCCL")
    finished = launch([ROOT / "tests/toy/horovod_on_gpu.py"], 1)
    assert finished.status == 0, finished.err
    assert json.loads(finished.out.splitlines()[-1]) == pytest.approx(few_steps(SingleCommunicator(), may_wait=True), rel=1e-6)


TWO = {
    "Gloo": {"torch_distributed": {"backend": "gloo"}},
    "Horovod": {"use_horovod": True},
}


@pytest.mark.parametrize("reduce_type", ["grad", "param"])
@pytest.mark.parametrize("transport", TWO)
def test_two_ranks_on_one_gpu(transport: str, reduce_type: str, corpus: Path, tmp_path: Path) -> None:
    """With gradients that are exchanged, they are one rank; with averaged parameters, two ranks on the CPU."""
    on_gpu = {**TWO[transport], "horovod_reduce_type": reduce_type, "horovod_param_sync_step": 3, "device": "cuda"}
    others = {"device": "cuda"} if reduce_type == "grad" else on_gpu | {"device": "cpu"}
    if transport == "Horovod" and pytest.importorskip("horovod.torch").nccl_built():
        pytest.skip("NCCL refuses two ranks on one GPU; Horovod without NCCL exchanges through the host's memory")
    found = []
    for name, keys, ranks in (("two", on_gpu, 2), ("others", others, 1 if reduce_type == "grad" else 2)):
        arguments = [
            "-m",
            "hvdtrain",
            TOY,
            *words({"corpus": corpus, "evaluated": True, "model": tmp_path / name / "model", **keys}),
        ]
        mpirun = transport == "Horovod" or ranks == 1
        finished = launch(arguments, ranks if ranks > 1 else None) if mpirun else torchrun(arguments, ranks)
        assert finished.status == 0, finished.err
        found.append(saved_model(tmp_path / name / "model", 1))
    assert_alike(*found, tolerance=1e-4)


@pytest.mark.parametrize("transport", ["NCCL", "Horovod"])
def test_two_ranks_on_one_gpu_are_refused_by_name(transport: str, corpus: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("each rank would have its own GPU")
    if transport == "Horovod" and not pytest.importorskip("horovod.torch").nccl_built():
        pytest.skip("Horovod was built without NCCL")
    keys = {"use_horovod": True} if transport == "Horovod" else {"torch_distributed": {}}
    arguments = ["-m", "hvdtrain", TOY, *words({"corpus": corpus, "model": tmp_path / "model", "device": "cuda", **keys})]
    finished = launch(arguments, 2) if transport == "Horovod" else torchrun(arguments, 2)
    assert finished.status != 0
    assert "expected one GPU per process, got two processes on the same GPU" in finished.err, finished.err
    assert finished.seconds < 60


def words(keys: dict[str, object]) -> list[str]:
    return [word for key, value in keys.items() for word in (f"++{key}", str(value))]


def test_a_batch_that_does_not_fit_is_split(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real lack of the GPU's memory: PyTorch may use only a part of it, and a step asks for a lot by its frames."""
    takes = """    model.norm.reset_running_stats()  # the first call changed them, but for a batch that is split
    model.norm.eval()  # its statistics would be those of a piece
    scores = model(data.raw_tensor)
    losses = functional.cross_entropy(scores.transpose(1, 2), classes.raw_tensor.long(), reduction="none") * data.mask
    frames = data.raw_tensor.shape[0] * data.raw_tensor.shape[1]
    taken = torch.empty(frames if context.train_flag else 0, 1 << 20, dtype=torch.uint8, device="cuda")  # evaluation is not split
"""
    found = {}
    total = torch.cuda.get_device_properties(0).total_memory
    for name, fits in (("whole", total), ("split", 128 * 2**20)):  # 24 sequences have up to 12 frames each
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (fits + torch.cuda.memory_reserved()) / total))
        try:
            keys = {"num_epochs": 1, "split_on_oom": True, "device": "cuda", "optimizer": {"class": "sgd"}}
            found[name] = trained(tmp_path / name, corpus, takes + SUM, keys)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert "split_on_oom: a batch does not fit into memory and is split" in capsys.readouterr().out
    (whole, lines), (split, split_lines) = found["whole"], found["split"]
    assert lines[0]["scores"] == pytest.approx(split_lines[0]["scores"], rel=1e-4)
    for name, values in whole.items():
        assert split[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


def test_a_training_goes_on_with_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    """`deterministic`: stopped after the first of two epochs, and then continued."""
    keys = {"device": "cuda", "deterministic": True, "optimizer": {"class": "adamw"}, "ema_decay": 0.9}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        whole, lines = trained(tmp_path / "whole", corpus, SUM, keys)
        trained(tmp_path / "parts", corpus, SUM, keys | {"num_epochs": 1})
        parts, more = trained(tmp_path / "parts", corpus, SUM, keys)
    torch.use_deterministic_algorithms(False)
    assert same(whole, parts)
    assert [line["scores"] for line in lines] == [line["scores"] for line in more]


def test_a_rank_that_is_killed_is_forked_again_and_trains_on_its_gpu(corpus: Path, tmp_path: Path) -> None:
    """Neither the process that is forked for it nor the one that saves for it has opened the device before it."""
    config = write_config(tmp_path)
    config.write_text(config.read_text() + CHILDREN)
    more = {"planted": "0,9,SIGKILL", "ngpu": 2, "max_restarts": 1, "save_in_background": True, "device": "cuda"}
    finished = launch(command(config, {**keys_of(corpus, tmp_path), **more, **TWO["Gloo"]}), timeout=300)
    assert finished.status == 0, finished.err
    children = [line.split() for line in (tmp_path / "children-of-0").read_text().splitlines()]
    assert any(int(after[0]) <= int(before[0]) for before, after in pairwise(children)), "it was restarted"
    assert {tuple(names) for _, *names in children} == {("hvdtrain-saver",)}
    assert trained_on(tmp_path / "trace") == {1: EPOCH}
