"""A stopped training goes on after its last finished epoch and ends with the same weights."""

from pathlib import Path

import pytest
import torch
from launching import TOY, hvdtrain
from trainings import Run, Trained, trains

RUNS = [Run("torch", "horovod", size) for size in (1, 2)]


@trains(*RUNS)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    common = {"optimizer": {"class": "adam"}, "layers": "statistics"}
    parts = {**common, "saved_as": "parts"}
    return {
        "whole": {**common, "num_epochs": 3},
        "first": {**parts, "num_epochs": 1},
        "second": {**parts, "num_epochs": 3},
        "again": {**parts, "num_epochs": 3},
        "logged": {"log": folder / "logs" / "train.log"},
    }


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_three_epochs_in_one_go_or_in_two(trained: Trained, run: Run) -> None:
    made = trained(trainings, run)
    assert "training goes on after epoch 1, step 20." in made.out("second")
    one, other = (torch.load(made.models[name].with_name("model.003.pt"), weights_only=True) for name in ("whole", "second"))
    assert one["model"].keys() == other["model"].keys()
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert "Already trained until final epoch 3, nothing to do." in made.out("again")
    assert [report["epoch"] for report in made.reports("again")] == [1, 2, 3]
    assert sorted(path.name for path in made.models["again"].parent.iterdir()) == [
        "model.001.pt",
        "model.002.opt.pt",
        "model.002.pt",
        "model.003.opt.pt",
        "model.003.pt",
        "scores.jsonl",
        "starts.jsonl",
    ]


def test_a_checkpoint_of_another_model_or_a_damaged_one_is_refused(corpus: Path, tmp_path: Path) -> None:
    overrides = {"corpus": corpus, "model": tmp_path / "model"}
    assert hvdtrain(TOY, overrides).status == 0
    other = hvdtrain(TOY, {**overrides, "layers": "statistics", "num_epochs": 2})
    assert other.status == 2
    assert f"{tmp_path}/model.001.pt: expected the parameters of this config's model, got others" in other.err
    assert "norm.weight" in other.err
    assert "Traceback" not in other.err
    path = tmp_path / "model.001.pt"
    path.write_bytes(path.read_bytes()[:1000])
    damaged = hvdtrain(TOY, {**overrides, "num_epochs": 2})
    assert damaged.status == 2
    assert f"{path}: expected a whole checkpoint" in damaged.err


def test_every_rank_writes_a_log_of_its_own(trained: Trained) -> None:
    made = trained(trainings, RUNS[1])
    assert sorted(path.name for path in (made.folder / "logs").iterdir()) == [
        "train.horovod-0-2.log",
        "train.horovod-1-2.log",
    ]
    for path in (made.folder / "logs").iterdir():
        assert "train epoch 1, finished after 20 steps, 0:00:0" in path.read_text()
    assert made.out("logged").count("finished after 20 steps") == 1
