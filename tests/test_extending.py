"""A plug-in of another distribution, installed as a wheel, adds one of each kind; a key of the optimizer touches two files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

PLUGIN = ROOT / "tests/toy/plugin"
"""The distribution that is installed: a plug-in with one of each kind."""

CONFIG = PLUGIN / "config.py"

KEY = (
    (
        "learner/keys.py",
        "class LearnerKeys(Section):",
        '    gradient_divisor: float = key(1.0, "divide gradients by this, after the reduction", positive)',
    ),
    (
        "learner/optimizer.py",
        "def change_gradients(keys: LearnerKeys, gradients: UpdateGradients) -> None:",
        "    if keys.gradient_divisor != 1:\n        gradients.divide(keys.gradient_divisor)",
    ),
)
"""What a key of the optimizer for all frameworks touches: file, line that is there, lines that are added behind it."""


def add_key(package: Path) -> None:
    """Add the key to a copy of the package."""
    shutil.copytree(ROOT / "hvdtrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    for place, behind, lines in KEY:
        path = package / place
        text = path.read_text()
        assert text.count(f"{behind}\n") == 1, f"{place}: {behind!r}"
        path.write_text(text.replace(f"{behind}\n", f"{behind}\n{lines}\n"))


def install_plugin(folder: Path) -> None:
    """Build the plug-in's wheel, and install it into a folder."""
    shutil.copytree(PLUGIN, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))  # as a build writes into it
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--target", folder / "plugin", folder / "source"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the package that has one more key, and the folder with the plug-in beside it."""
    folder = tmp_path_factory.mktemp("extended")
    add_key(folder / "hvdtrain")
    install_plugin(folder)
    return folder


def run(extended: Path, *arguments: object, status: int = 0) -> str:
    """What Python prints with the extended package."""
    paths = [str(extended), str(extended / "plugin"), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + (done.stderr if status else "")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["scores"]["train_loss_square"] for line in (folder / "scores.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_framework_trains_on_the_dataset_and_goes_on(extended: Path, tmp_path: Path) -> None:
    plain = ["-m", "hvdtrain", CONFIG, "++model", tmp_path / "plain/model"]
    tracker = f"{{'class': 'list', 'path': '{tmp_path}/tracked'}}"
    run(extended, *plain, "++epoch_file", tmp_path / "epochs.txt", "++trackers", tracker)
    first, *_, last = losses(tmp_path / "plain")
    assert last < first / 2
    assert [line.split(":")[0] for line in (tmp_path / "epochs.txt").read_text().splitlines()] == [
        "epoch 1",
        "epoch 2",
        "epoch 3",
    ]
    assert [line.split()[0] for line in (tmp_path / "tracked").read_text().splitlines()] == ["1", "2", "3"]
    run(extended, *plain, "++num_epochs", 5)
    assert len(losses(tmp_path / "plain")) == 5
    run(extended, "-m", "hvdtrain", CONFIG, "++model", tmp_path / "whole/model", "++num_epochs", 5)
    assert losses(tmp_path / "whole") == losses(tmp_path / "plain"), "it went on where it stopped"


def test_the_task_command_scheduler_translation_and_source_do_their_work(extended: Path, tmp_path: Path) -> None:
    assert run(extended, "-m", "hvdtrain", "greet", "you") == "hello you\n"
    assert "  greet            print a greeting\n" in run(extended, "-m", "hvdtrain", "--help")
    keys = ["++model", tmp_path / "model"]
    assert "40 sequences with 120 frames" in run(extended, "-m", "hvdtrain", CONFIG, *keys, "++task", "count_frames")
    shown = run(extended, "-m", "hvdtrain", CONFIG, *keys, "++passes", "2", "--print-config", "--changed")
    assert "num_epochs = 2 " in shown
    assert "8 sequences" in run(extended, "-m", "hvdtrain", "dump", "{'class': 'Ramp', 'count': 8}", tmp_path / "ramp.hdf")
    script = run(extended, "-m", "hvdtrain", "submit", CONFIG, "--scheduler", "queue", "--memory", "2G", *keys)
    assert "#QUEUE memory=2048\n" in script
    assert f"-m hvdtrain {CONFIG}" in script


def test_help_lists_the_keys_and_takes_no_numpy(extended: Path) -> None:
    program = "import sys; from hvdtrain.cli import main; main(['help', 'all']); print('numpy' in sys.modules)"
    *lines, last = run(extended, "-c", program).splitlines()
    assert last == "False"
    assert {"    slope", "    epoch_share", "    gradient_divisor", "    epoch_file"} <= set(lines)


REDUCE = """
import sys
from pathlib import Path
from thread_ranks import on_ranks
from hvdtrain.data.opening import open_dataset
from hvdtrain.learner.frameworks import FRAMEWORKS, BuildOptions
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate
from hvdtrain.runtime.timer import Timer
from hvdtrain.settings import read_settings
import numpy

settings = read_settings([Path(sys.argv[1])], {"horovod_reduce_type": "epoch", "epoch_share": "0.25", "model": "none"})

def work(comm):
    reducer, dataset = settings.reduce.reducer(comm, Timer()), open_dataset(settings.train)
    options = BuildOptions(rank=comm.rank, local_rank=0, threads=1, seed=1)
    learner = FRAMEWORKS["arrays"].build(settings.learner, reducer.gradients, options)
    reducer.sync.begin_epoch(learner.state, EpochStart(1, 0, 2, 0.1, is_resumed=False))
    for step in range(2):
        learner.backward(dataset.batch(numpy.array([2 * step + comm.rank])))
        learner.update(0.1)
        reducer.sync.after_update(learner.state, FinishedUpdate([True] * comm.size, step + 1, 0.1))
    alone = learner.model.parameters["weight"].copy()
    reducer.sync.end_of_epoch(learner.state)
    return alone, learner.model.parameters["weight"]

(first, together), (second, other) = on_ranks(2, work)
assert not numpy.allclose(first, second)
assert numpy.array_equal(together, other)
assert numpy.allclose(together, 0.25 * (first + second) / 2)
"""


@pytest.mark.slow
def test_the_reducer_averages_on_two_ranks(extended: Path) -> None:
    run(extended, "-c", REDUCE, CONFIG)


DIVIDE = """
import sys
import numpy
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.data.types import Batch, Padded
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.frameworks import FRAMEWORKS, BuildOptions
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.runtime.timer import Timer

def get_model(**_):
    if sys.argv[1] == "torch":
        import torch
        return torch.nn.Linear(2, 1)
    import keras
    return keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(1)])

def train_step(*, model, extern_data, **_):
    get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor), "sum")

def change(**keys):
    learner = FRAMEWORKS[sys.argv[1]].build(
        LearnerKeys(get_model=get_model, train_step=train_step, optimizer={"class": "sgd"}, **keys),
        GradientExchange(SingleCommunicator(), Timer()),
        BuildOptions(rank=0, local_rank=0, threads=1, seed=1, model_format=FRAMEWORKS[sys.argv[1]].suffix),
    )
    before = dict(learner.state.named_parameters())
    learner.begin_epoch(1, 0)
    learner.backward(Batch({"data": Padded(numpy.ones((1, 3, 2), "float32"), numpy.array([3], "int32"))}, numpy.array([0])))
    learner.update(0.5)
    return {name: array - before[name] for name, array in learner.state.named_parameters()}

whole, quarter = change(), change(gradient_divisor=4.0)
assert all(numpy.allclose(whole[name], -1.5) for name in whole), whole
assert all(numpy.allclose(quarter[name], -0.375) for name in quarter), quarter
"""


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_key_of_the_optimizer_takes_effect(extended: Path, framework: str) -> None:
    run(extended, "-c", DIVIDE, framework)
