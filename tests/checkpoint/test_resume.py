"""A stopped training goes on after its last finished epoch and ends with the same weights."""

import json
from pathlib import Path

import pytest
import torch
from launching import TOY, hvdtrain


def final(folder: Path, epoch: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"model.{epoch:03d}.pt", weights_only=True)["model"]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("ranks", [None, 2])
def test_three_epochs_in_one_go_or_in_two(corpus: Path, tmp_path: Path, ranks: int | None) -> None:
    common = {"corpus": corpus, "use_horovod": ranks is not None, "optimizer": {"class": "adam"}, "layers": "statistics"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert hvdtrain(TOY, {**common, "model": whole / "model", "num_epochs": 3}, ranks).status == 0
    first = hvdtrain(TOY, {**common, "model": parts / "model", "num_epochs": 1}, ranks)
    assert first.status == 0
    second = hvdtrain(TOY, {**common, "model": parts / "model", "num_epochs": 3}, ranks)
    assert second.status == 0
    assert "training goes on after epoch 1, step 20." in second.out
    assert_same(final(whole, 3), final(parts, 3))
    again = hvdtrain(TOY, {**common, "model": parts / "model", "num_epochs": 3}, ranks)
    assert again.status == 0
    assert "Already trained until final epoch 3, nothing to do." in again.out
    epochs = [json.loads(line)["epoch"] for line in (parts / "scores.jsonl").read_text().splitlines()]
    assert epochs == [1, 2, 3]
    assert sorted(path.name for path in parts.iterdir()) == [
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


def test_every_rank_writes_a_log_of_its_own(corpus: Path, tmp_path: Path) -> None:
    overrides = {"corpus": corpus, "model": tmp_path / "model", "use_horovod": 1, "log": tmp_path / "logs" / "train.log"}
    finished = hvdtrain(TOY, overrides, ranks=2)
    assert finished.status == 0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "train.horovod-0-2.log",
        "train.horovod-1-2.log",
    ]
    for path in (tmp_path / "logs").iterdir():
        assert "train epoch 1, finished after 20 steps, 0:00:0" in path.read_text()
    assert finished.out.count("finished after 20 steps") == 1
