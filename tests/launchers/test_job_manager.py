"""What a job manager (i6_core's ReturnnTrainingJob) does with the folder that stands for RETURNN's: its commands, one after the
other in one work folder, and how it reads what they leave."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import ROOT, Finished, clean_environment, finish, launch

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.plugins.schedules.file import read_learning_rate_file

RNN = ROOT / "tools" / "returnn_root"

CONFIG = """#!returnn/rnn.py

import torch
from returnn.frontend import get_run_ctx

backend = "torch"
dev = {"class": "HDFDataset", "files": [DATA]}
train = {"class": "HDFDataset", "files": [DATA], "seq_ordering": "random"}
learning_rate = 0.1
learning_rate_file = "learning_rates"
max_seqs = 2
optimizer = {"class": "sgd", "momentum": 0.9}
target = "classes"
task = "train"
device = "cpu"
log = ["./returnn.log"]
log_verbosity = 3
model = MODEL
save_interval = 1
torch_distributed = {"backend": "gloo"}


def get_model(*, epoch, step, **_kwargs):
    return torch.nn.Linear(3, 2)


def train_step(*, model, extern_data, **_kwargs):
    data, targets = extern_data["data"], extern_data["classes"]
    mask = torch.arange(data.raw_tensor.shape[1])[None] < data.dims[1].dyn_size_ext.raw_tensor[:, None]
    scores = model(data.raw_tensor)[mask]
    loss = torch.nn.functional.cross_entropy(scores, targets.raw_tensor[mask].long(), reduction="sum")
    get_run_ctx().mark_as_loss(loss, name="ce", custom_inv_norm_factor=mask.sum())


"""


def read_as_the_job_does(path: Path) -> dict[int, Any]:
    """As `_try_load_lr_log` evaluates the file."""
    numbers = {"EpochData": dict, "nan": float("nan"), "inf": float("inf"), "np": numpy}
    read: dict[int, Any] = eval(path.read_text(), numbers)
    return read


def best_epoch(path: Path, key: str) -> int:
    """As GetBestEpochJob finds it."""

    def epoch_data(learningRate: float, error: dict[str, float]) -> dict[str, Any]:  # noqa: N803  # the file's name
        return {"learning_rate": learningRate, "error": error}

    numbers = {"EpochData": epoch_data, "nan": float("nan"), "inf": float("inf"), "np": numpy}
    data = eval(path.read_text(), numbers)
    scores = [(epoch, data[epoch]["error"][key]) for epoch in sorted(data) if key in data[epoch]["error"]]
    return int(sorted(scores, key=lambda pair: pair[1])[0][0])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "work").mkdir()
    (folder / "output" / "models").mkdir(parents=True)
    rng = numpy.random.RandomState(1)
    with HDFWriter(folder / "data.hdf", labels={"classes": ["a", "b"]}) as writer:
        for number in range(8):
            frames = rng.randint(1, 6)
            arrays = {
                "data": rng.normal(size=(frames, 3)).astype("float32"),
                "classes": rng.randint(2, size=frames).astype("int32"),
            }
            writer.add(f"seq-{number}", arrays)
    return folder


def run(job: Path, num_epochs: int, prefix: list[str], more: str = "") -> Finished:
    """Write the config, and run the command in the work folder."""
    config = job / "output" / "returnn.config"
    text = CONFIG.replace("DATA", repr(str(job / "data.hdf"))).replace("MODEL", repr(str(job / "output" / "models" / "epoch")))
    config.write_text(f"{text}\nnum_epochs = {num_epochs}\n{more}", encoding="utf-8")
    command = [*prefix, str(RNN / "rnn.py"), str(config)]
    environment = clean_environment() | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    return finish(["env", "-C", str(job / "work"), *command], 300, environment)


MPIRUN = "mpirun -np 2 -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib --report-bindings".split()
TORCHRUN = "-mtorch.distributed.run --standalone --nnodes=1 --nproc-per-node=2 --tee=3".split()


def test_a_training_job(job: Path) -> None:
    """One process, then more epochs (which such a job may be given later) with mpirun and with torchrun."""
    models, rates = job / "output" / "models", job / "work" / "learning_rates"
    alone = run(job, 1, [sys.executable], "torch_distributed = None")
    assert alone.status == 0, alone.err
    assert (models / "epoch.001.pt").exists()
    assert (models / "epoch.001.opt.pt").exists()
    assert (job / "work" / "returnn.log").exists()
    first = read_as_the_job_does(rates)
    assert max(epoch for epoch, data in first.items() if len(data["error"]) > 0) == 1
    mpirun = run(job, 2, [*MPIRUN, sys.executable], "torch_distributed = None\nuse_horovod = True")
    assert mpirun.status == 0, mpirun.err
    torchrun = run(job, 3, [sys.executable, *TORCHRUN], "use_horovod = True")
    assert torchrun.status == 0, torchrun.err
    saved = {path.name for path in models.glob("epoch.*.pt") if ".opt" not in path.name}
    assert saved == {f"epoch.{epoch:03d}.pt" for epoch in (1, 2, 3)}
    last = read_as_the_job_does(rates)
    assert last[1] == first[1], "what was noted of an earlier epoch stays"
    assert [data["learningRate"] for data in last.values()] == [0.1, 0.1, 0.1]
    errors = [data["error"] for data in last.values()]
    assert [error[":meta:epoch_num_train_steps"] for error in errors] == [4, 2, 2]
    assert [error[":meta:global_train_step_end"] for error in errors] == [4, 6, 8]
    assert all({"train_loss_ce", "dev_loss_ce", ":meta:hostname", ":meta:time"} <= error.keys() for error in errors)
    by_score = sorted(last, key=lambda epoch: last[epoch]["error"]["dev_loss_ce"])
    assert best_epoch(rates, "dev_loss_ce") == by_score[0]
    assert [record.epoch for record in read_learning_rate_file(rates)] == [1, 2, 3]
    again = run(job, 3, [sys.executable], "torch_distributed = None")
    assert again.status == 0, "a job that is started once more after its end"


def test_a_job_that_fails(job: Path) -> None:
    """`check_call` raises for any other status than 0."""
    config = job / "output" / "broken.config"
    config.write_text("#!returnn/rnn.py\nlearning_rate = 'fast'\n", encoding="utf-8")
    broken = launch([RNN / "rnn.py", config])
    assert broken.status == 2
    assert "learning_rate" in broken.err


def test_a_dump_job(job: Path) -> None:
    """Into a file that exists already, as ReturnnDumpHDFJob makes it."""
    config, out = job / "work" / "dataset.config", job / "work" / "tmp.hdf"
    config.write_text(f"#!rnn.py\ntrain = {{'class': 'HDFDataset', 'files': [{str(job / 'data.hdf')!r}]}}\n", encoding="utf-8")
    out.touch()
    arguments = [str(RNN / "tools" / "hdf_dump.py"), str(config), str(out), "--start_seq", "1", "--end_seq", "3", "--epoch", "1"]
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=clean_environment(), timeout=120)
    read = open_hdf([out])
    assert read.tags(range(read.num_sequences)) == ["seq-1", "seq-2", "seq-3"]
    read.close()
