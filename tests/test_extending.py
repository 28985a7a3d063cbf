"""What a change touches: each kind of extension is really made, in a copy of the package, and counted.

CONTRIBUTING.md has the table. `python tests/test_extending.py` writes it, and so does `make docs`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import ROOT

ADDED = ROOT / "tests/toy/extending"
"""The files that are added."""

CONFIG = ADDED / "arrays_config.py"


@dataclass(frozen=True)
class Change:
    """An extension of the package.

    Attributes:
        adds: what it adds, for the table.
        edits: (file, line that is there, lines that are added behind it).
        files: by place in the package, the file or folder that is added.
    """

    adds: str
    edits: tuple[tuple[str, str, str], ...]
    files: tuple[tuple[str, str], ...] = ()


CHANGES = (
    Change(
        "a kind of dataset with keys",
        (
            ("data/kinds.py", "", "from hvdtrain.data.formats.linear import LinearDatasetKeys"),
            ("data/kinds.py", '    "DummyDataset": DummyDatasetKeys,', '    "LinearDataset": LinearDatasetKeys,'),
        ),
        (("data/formats/linear.py", "dataset.py"),),
    ),
    Change(
        "a reducer with keys",
        (
            ("learner/reducers.py", "", "from hvdtrain.learner.epoch_average import EpochAverage"),
            ("learner/reducers.py", "REDUCERS: dict[str, ReducerClass] = {", '    "epoch": EpochAverage,'),
        ),
        (("learner/epoch_average.py", "reducer.py"),),
    ),
    Change(
        "a key of the optimizer, for all frameworks",
        (
            (
                "learner/base.py",
                "class LearnerKeys(Section):",
                '    gradient_divisor: float = key(1.0, "divide gradients by this, after the reduction", positive)',
            ),
            (
                "learner/optimizer.py",
                "def change_gradients(keys: LearnerKeys, gradients: UpdateGradients) -> None:",
                "    if keys.gradient_divisor != 1:\n        gradients.divide(keys.gradient_divisor)",
            ),
        ),
    ),
    Change(
        "a scheduler of `submit`",
        (
            ("submit/schedulers.py", "", "from hvdtrain.submit.queue import QUEUE"),
            ("submit/schedulers.py", "        KUBERNETES,", "        QUEUE,"),
        ),
        (("submit/queue.py", "scheduler.py"),),
    ),
    Change(
        "a task",
        (("settings.py", "TASKS = {", '    "count_frames": "hvdtrain.tasks.count_frames:count_frames",'),),
        (("tasks/count_frames.py", "task.py"),),
    ),
    Change(
        "a framework",
        (
            (
                "learner/frameworks.py",
                "FRAMEWORKS: dict[str, Framework] = {",
                '    "arrays": Framework("hvdtrain.learner.arrays", "arrays"),',
            ),
        ),
        (("learner/arrays", "framework"),),
    ),
)


def texts(package: Path) -> dict[str, list[str]]:
    """The lines of every file of a package."""
    return {path.relative_to(package).as_posix(): path.read_text().splitlines() for path in package.rglob("*.py")}


def make(change: Change, package: Path) -> str:
    """Make a change; return what it touched, for the table."""
    before = texts(package)
    for place, source in change.files:
        if (ADDED / source).is_dir():
            shutil.copytree(ADDED / source, package / place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ADDED / source, package / place)
    for place, behind, lines in change.edits:
        path = package / place
        text = path.read_text()
        behind = behind or re.findall(r"^from hvdtrain\.[^(\n]*$", text, re.MULTILINE)[0]  # the import
        assert text.count(f"{behind}\n") == 1, f"{place}: {behind!r}"
        path.write_text(text.replace(f"{behind}\n", f"{behind}\n{lines}\n"))
    after = texts(package)
    new, edited = after.keys() - before.keys(), [place for place in before if before[place] != after[place]]
    lines = [line for place in edited for line in after[place] if line not in before[place] and not line.startswith("from ")]
    is_folder = len(new) > 1 and len({Path(place).parent for place in new}) == 1
    if len(lines) == 1:
        return f"{'a folder' if is_folder else len(new)}, and a line in `{edited[0]}`"
    return f"{len(new) + len(edited)}: {', '.join(f'`{place}`' for place in edited)}"


def extend(package: Path) -> str:
    """Copy the package, make all changes in the copy, and return the table of what each of them touched."""
    shutil.copytree(ROOT / "hvdtrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    rows = [f"| {change.adds} | {make(change, package)} |" for change in CHANGES]
    return "\n".join(["| to add | files in `hvdtrain/` |", "|---|---|", *rows]) + "\n"


TABLE = re.compile(r"^\| to add \|.*\n(?:\|.*\n)+", re.MULTILINE)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the extended package, and the table next to it."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "table").write_text(extend(folder / "hvdtrain"))
    return folder


def run(extended: Path, *arguments: object) -> str:
    """What Python prints with the extended package."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(extended), str(ROOT / "tests")])}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["scores"]["train_loss_square"] for line in (folder / "scores.jsonl").read_text().splitlines()]


def test_contributing_says_what_each_change_touches(extended: Path) -> None:
    [table] = TABLE.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert table == (extended / "table").read_text(), "python tests/test_extending.py writes it"


@pytest.mark.slow
def test_the_added_framework_trains_on_the_added_dataset_and_goes_on(extended: Path, tmp_path: Path) -> None:
    plain = ["-m", "hvdtrain", CONFIG, "++model", tmp_path / "plain/model"]
    run(extended, *plain)
    first, *_, last = losses(tmp_path / "plain")
    assert last < first / 2
    run(extended, *plain, "++num_epochs", 5)
    assert len(losses(tmp_path / "plain")) == 5
    run(extended, "-m", "hvdtrain", CONFIG, "++model", tmp_path / "whole/model", "++num_epochs", 5)
    assert losses(tmp_path / "whole") == losses(tmp_path / "plain"), "it went on where it stopped"


def test_the_added_task_and_scheduler_do_their_work(extended: Path, tmp_path: Path) -> None:
    keys = ["++model", tmp_path / "model"]
    assert "40 sequences with 120 frames" in run(extended, "-m", "hvdtrain", CONFIG, *keys, "++task", "count_frames")
    script = run(extended, "-m", "hvdtrain", "submit", CONFIG, "--scheduler", "queue", "--memory", "2G", *keys)
    assert "#QUEUE memory=2048\n" in script
    assert f"-m hvdtrain {CONFIG}" in script


def test_help_lists_the_added_keys_and_takes_no_numpy(extended: Path) -> None:
    program = "import sys; from hvdtrain.cli import main; main(['help', 'all']); print('numpy' in sys.modules)"
    *lines, last = run(extended, "-c", program).splitlines()
    assert last == "False"
    assert {"    slope", "    epoch_share", "    gradient_divisor"} <= set(lines)


REDUCE = """
import sys
from pathlib import Path
from thread_ranks import on_ranks
from hvdtrain.data.sources import open_dataset
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
def test_the_added_reducer_averages_on_two_ranks(extended: Path) -> None:
    run(extended, "-c", REDUCE, CONFIG)


DIVIDE = """
import sys
import numpy
from hvdtrain.comm.base import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.data.types import Batch, Padded
from hvdtrain.learner.base import LearnerKeys
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
def test_the_added_key_of_the_optimizer_takes_effect(extended: Path, framework: str) -> None:
    run(extended, "-c", DIVIDE, framework)


def main(arguments: Sequence[str]) -> None:
    """Write the table into CONTRIBUTING.md."""
    page = ROOT / "CONTRIBUTING.md"
    with tempfile.TemporaryDirectory() as folder:
        table = extend(Path(folder) / "hvdtrain")
    page.write_text(TABLE.sub(table, page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
