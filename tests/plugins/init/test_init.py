"""`hvdtrain init`: every config that it writes trains as it is."""

import json
import re
from pathlib import Path

import h5py
import numpy
import pytest
from launching import hvdtrain

from hvdtrain.config.missing import import_failure
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.plugins.init.__main__ import TEMPLATES as OF_THE_CORE
from hvdtrain.plugins.init.__main__ import main
from hvdtrain.settings import read_settings

SLOW = ("returnn", "tensorflow")
"""These import much."""

TEMPLATES = (*OF_THE_CORE, *SLOW)


@pytest.mark.parametrize("template", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TEMPLATES])
def test_a_config_trains_as_it_is(template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, files = tmp_path / "mine.py", tmp_path / "train.hdf"
    with HDFWriter(files, dims={"classes": 5}) as writer:
        for number in range(20):
            classes = numpy.random.default_rng(number).integers(0, 5, 10)
            frames = numpy.eye(7, dtype=numpy.float32)[classes]
            writer.add(f"seq-{number}", {"data": frames, "classes": classes.astype(numpy.int32)})
    given = ["--files", str(files), str(files)] if template == "hdf" else []
    assert main([str(config), f"--{template}", *given]) == 0
    assert f"python -m hvdtrain {config}" in capsys.readouterr().out
    assert ("FEATURES, CLASSES = 7, 5\n" in config.read_text()) == bool(given)
    assert "python -m hvdtrain mine.py " in config.read_text()
    assert "CONFIG" not in config.read_text()
    assert 'model = "exp/mine/model"' in config.read_text(), "no two configs train the same model"
    assert config.read_text().count("NAME") == 0
    overrides = {"model": tmp_path / "model", "num_epochs": 2, "num_threads": 1} | ({"batch_size": 100} if given else {})
    finished = hvdtrain(config, overrides)
    assert finished.status == 0, finished.err
    first, last = (json.loads(line)["scores"] for line in (tmp_path / "scores.jsonl").read_text().splitlines())
    assert last["dev_loss_ce"] < first["dev_loss_ce"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_keys_in_comments_are_keys(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "mine.py"
    assert main([str(config), f"--{template}"]) == 0
    lines = re.findall(r"^# (\w+ = .*)$", config.read_text(), flags=re.MULTILINE)
    assert len(lines) == 6
    (tmp_path / "my_callbacks.py").write_text("class MyCallbacks:\n    def on_epoch_end(self, training): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = [
        "train = dev = {'class': 'HDFDataset', 'files': ['x.hdf']}",
        "batch_size = learning_rate = 1",
        f"model = '{tmp_path}/m'",
    ]
    given += ["def get_model(**_): ...", "def train_step(**_): ..."]
    config.write_text("\n".join([*given, *lines]))
    settings = read_settings([config], {})
    assert settings.ending.early_stopping_patience == 5
    assert settings.callbacks.callbacks == "my_callbacks:MyCallbacks"


@pytest.mark.parametrize(
    ("shape", "labels", "dim"),
    [((10, 7), 4, 5), ((10, 4, 3), 10, 5), ((10,), 10, 5), ((10, 7), 10, 1), ((10, 7), 0, 5)],
    ids=["other lengths", "pictures", "samples", "no dim", "no classes"],
)
def test_files_of_other_kinds(
    shape: tuple[int, ...], labels: int, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with HDFWriter(Path("train.hdf"), dims={"classes": 5} if labels else {}) as writer:
        classes = {"classes": numpy.full(labels, 4, numpy.int32)} if labels else {}
        writer.add("seq", {"data": numpy.zeros(shape, numpy.float32), **classes})
    if dim == 1:
        with h5py.File("train.hdf", "r+") as file:
            file["targets/size"].attrs["classes"] = [1, 1]  # as of RETURNN's SimpleHDFWriter without a dim
    assert main(["mine.py", "--hdf", "--files", "train.hdf"]) == 2
    assert main(["mine.py", "--hdf"]) == 0
    assert "FEATURES, CLASSES = 40, 100\n" in Path("mine.py").read_text()


def test_a_file_without_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "train.hdf", "w") as file:
        file["inputs"], file["seqLengths"], file["seqTags"] = numpy.zeros((0, 7)), numpy.zeros((0, 1), int), numpy.zeros(0, "S5")
    assert main([str(tmp_path / "mine.py"), "--hdf", "--files", str(tmp_path / "train.hdf")]) == 2
    assert "expected at least one sequence, got none" in capsys.readouterr().err


def test_no_file_hides_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([str(tmp_path / "numpy.py")]) == 2
    assert "expected a name that no installed package has, got numpy" in capsys.readouterr().err
    monkeypatch.syspath_prepend(tmp_path)
    text = import_failure(ModuleNotFoundError("No module named 'h5py.inside'", name="h5py.inside"))
    assert "hides" not in text
    (tmp_path / "h5py.py").write_text("")
    text = import_failure(ModuleNotFoundError("No module named 'h5py.inside'", name="h5py.inside"))
    assert text.endswith(f"({tmp_path}/h5py.py hides the package of that name: rename the file)")
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "other").mkdir()
    assert main([str(tmp_path / "other" / "mine.py")]) == 0


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("mine")
    assert main([str(tmp_path / "mine.py")]) == 2
    assert main([str(tmp_path / "nowhere" / "mine.py")]) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        f"{tmp_path}/mine.py: expected the name of a new file, got one that exists\n"
        f"{tmp_path}/nowhere/mine.py: expected a file that can be written, got: No such file or directory\n"
    )
    assert printed.out == ""
    assert (tmp_path / "mine.py").read_text() == "mine"
