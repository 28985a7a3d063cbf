"""`hvdtrain card`: the card of a training, read with the package of the Hub."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import huggingface_hub
import numpy
import pytest
from inside import run_inside
from launching import TOY

import hvdtrain
from hvdtrain.errors import DataError
from hvdtrain.plugins.report.card import _yaml, check, main
from hvdtrain.report.commit import commit_of


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of two epochs, whose config is in a repository."""
    folder = tmp_path_factory.mktemp("card")
    shutil.copy(TOY, folder / "config.py")
    git = ["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e@x"]
    for command in (["init", "-q", "-b", "trunk"], ["add", "config.py"], ["commit", "-q", "-m", "begin"]):
        subprocess.run([*git, *command], check=True)
    keys = {"corpus": corpus, "model": folder / "exp" / "model", "evaluated": True, "num_epochs": 2}
    finished = run_inside([folder / "config.py", *(word for name, value in keys.items() for word in (f"++{name}", value))])
    assert finished.status == 0, finished.err
    return folder


def test_the_hub_reads_the_card(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained / "exp"
    options = ["--task", "automatic-speech-recognition", "--dataset", "toy", "--license", "mit", "--language", "en"]
    assert main([str(folder), *options]) == 0
    assert capsys.readouterr().out == f"{folder}/README.md\n"
    read = huggingface_hub.ModelCard.load(folder / "README.md")
    assert (read.data.license, read.data.language, read.data.pipeline_tag) == ("mit", ["en"], "automatic-speech-recognition")
    assert (read.data.library_name, read.data.model_name) == ("hvdtrain", "exp")
    found = {(one.dataset_name, one.metric_type): one.metric_value for one in read.data.eval_results}
    best = re.search(r"weights after epoch (\d) of 2", read.text)
    assert best is not None
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    scores = lines[int(best[1]) - 1]["scores"]
    assert found == {("toy (dev)", name.removeprefix("dev_loss_")): value for name, value in scores.items() if "dev" in name}
    commit = subprocess.run(
        ["git", "-C", trained, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert f"| commit | `{commit}` |" in read.text
    assert TOY.read_text().rstrip() in read.text


def test_the_code_of_the_card_loads_the_model(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained / "exp"
    assert main([str(folder), "--overwrite"]) == 0
    text = (folder / "README.md").read_text()
    first, second = re.findall(r"^```python\n(import (?:hvdtrain|torch)\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(folder)
    shutil.copy(trained / "config.py", folder)
    names: dict[str, object] = {}
    [call] = re.findall(r'load_model\("(\S+)"', first)
    exec(second, names)
    model = hvdtrain.load_model(call)
    for name, tensor in model.state_dict().items():
        assert numpy.array_equal(tensor.numpy(), names["state"][name].numpy())  # type: ignore[index]


def test_changes_since_the_commit_are_named(trained: Path) -> None:
    (trained / "config.py").write_text(TOY.read_text() + "# changed\n")
    assert main([str(trained / "exp"), "--overwrite"]) == 0
    assert "with changes" not in (trained / "exp" / "README.md").read_text(), "what was trained is the commit's"


def test_no_card_is_overwritten(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trained / "exp" / "README.md").write_text("mine")
    assert main([str(trained / "exp")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (trained / "exp" / "README.md").read_text() == "mine"
    assert main([str(trained)]) == 2
    assert "scores.jsonl" in capsys.readouterr().err


def test_a_training_without_a_finished_epoch_has_no_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "starts.jsonl").write_text('{"command": "python -m hvdtrain config.py"}\n')
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: expected at least one finished epoch, got none\n"


def test_metadata_that_the_hub_does_not_read_is_an_error() -> None:
    with pytest.raises(DataError, match="huggingface_hub can read"):
        check("---\nmodel-index: 3\n---\n# a\n")
    with pytest.raises(DataError, match="got none"):
        check("---\ntags: [a]\n---\n# a\n")


def test_yaml_is_what_was_written() -> None:
    yaml = pytest.importorskip("yaml")
    value = {"a": [{"b": 'x: "y"', "c": [1, 2.5]}, "d"], "e": {"f": None, "g": []}, "h": "ü"}
    assert yaml.safe_load(_yaml(value)) == value


def test_the_commit_is_that_of_git(tmp_path: Path) -> None:
    def git(*arguments: str, folder: Path = tmp_path) -> str:
        command = ["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert commit_of(tmp_path) == "" or commit_of(tmp_path) == commit_of(tmp_path.parent)
    git("init", "-q", "-b", "trunk")
    assert commit_of(tmp_path) == ""
    git("commit", "-q", "--allow-empty", "-m", "one")
    (tmp_path / "inner").mkdir()
    assert commit_of(tmp_path / "inner") == git("rev-parse", "HEAD")
    git("worktree", "add", "-q", "-b", "other", "tree")
    git("commit", "-q", "--allow-empty", "-m", "two", folder=tmp_path / "tree")
    assert commit_of(tmp_path / "tree") == git("rev-parse", "other") != git("rev-parse", "trunk")
    git("pack-refs", "--all")
    assert commit_of(tmp_path) == git("rev-parse", "trunk")
    assert commit_of(tmp_path / "tree") == git("rev-parse", "other")
    git("checkout", "-q", "--detach")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")
