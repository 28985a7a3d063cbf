"""A stopped training continues after its last finished epoch and ends with the same weights."""

import json
from pathlib import Path

import numpy
import torch
from launching import TOY, hvdtrain
from trainings import Run, Trained, assert_same, saved_model, trains

from hvdtrain.checkpoint.progress import EpochProgress, Progress
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

ONE = Run("torch", "horovod", 1)
"""Two ranks: tests/ranks/test_contract.py."""


@trains(ONE)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    common = {"optimizer": {"class": "adam"}, "layers": "statistics"}
    parts = {**common, "saved_as": "parts"}
    return {
        "whole": {**common, "num_epochs": 2},
        "first": {**parts, "num_epochs": 1},
        "second": {**parts, "num_epochs": 2},
        "again": {**parts, "num_epochs": 2},
    }


def test_two_epochs_in_one_go_or_in_two(trained: Trained) -> None:
    made = trained(trainings, ONE)
    assert "training continues after epoch 1, step 20." in made.out("second")
    assert "this process was started alone" not in made.out("second")  # but by mpirun, on one rank, too
    assert_same(*(saved_model(made.models[name], 2) for name in ("whole", "second")))
    assert "Already trained until final epoch 2, nothing to do." in made.out("again")
    assert [report["epoch"] for report in made.reports("again")] == [1, 2]
    assert sorted(path.name for path in made.models["again"].parent.iterdir()) == [
        "best.json",
        "ends.jsonl",
        "model.001.opt.pt",
        "model.001.pt",
        "model.002.opt.pt",
        "model.002.pt",
        "scores.jsonl",
        "starts.jsonl",
        "steps.jsonl",
        "summary.json",
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


def test_another_optimizer_is_refused_and_a_new_one_begins_if_it_is_asked_for(corpus: Path, tmp_path: Path) -> None:
    """Adam to SGD, whose groups have no betas; Adam to AdamW, which has the same groups; and files of before, without a name."""
    keys = {"corpus": corpus, "model": tmp_path / "model", "part": "two.hdf"}
    assert hvdtrain(TOY, {**keys, "optimizer": {"class": "adam"}}).status == 0
    path = tmp_path / "model.001.opt.pt"
    for other in ("SGD", "AdamW"):
        ended = hvdtrain(TOY, {**keys, "num_epochs": 2, "optimizer": {"class": other.lower()}})
        assert ended.status == 2
        assert f"{path}: expected the state of the optimizer {other}, got that of Adam (continue with the optimizer" in ended.err
        assert "++fresh_optimizer 1" in ended.err
        assert "Traceback" not in ended.err
    contents = torch.load(path, weights_only=True)
    assert contents.pop("optimizer_class") == "Adam"
    torch.save(contents, path)
    ended = hvdtrain(TOY, {**keys, "num_epochs": 2, "optimizer": {"class": "sgd", "momentum": 0.9}})
    assert ended.status == 2
    assert "expected the state of the optimizer SGD for this model, got another: it has no momentum, dampening" in ended.err
    fresh = {**keys, "num_epochs": 2, "optimizer": {"class": "sgd", "momentum": 0.9}, "fresh_optimizer": True}
    ended = hvdtrain(TOY, fresh)
    assert ended.status == 0, ended.err
    assert "training continues after epoch 1, step 1, with a new optimizer." in ended.out
    [group] = torch.load(tmp_path / "model.002.opt.pt", weights_only=True)["optimizer"]["param_groups"]
    assert group["momentum"] == 0.9


def test_sequences_without_a_frame_are_refused(tmp_path: Path) -> None:
    with HDFWriter(tmp_path / "train.hdf", dims={"classes": 5, "id": 3}) as writer:
        for number in range(3):
            nothing = {"data": numpy.zeros((0, 4), numpy.float32), "classes": numpy.zeros(0, numpy.int32)}
            writer.add(f"seq-{number}", {**nothing, "id": numpy.zeros(0, numpy.int32)})
    ended = hvdtrain(TOY, {"corpus": tmp_path, "model": tmp_path / "model"})
    assert ended.status == 2
    assert "train: expected frames, got 3 sequences, all of length 0" in ended.err


def test_the_learning_rates_of_an_epoch_are_in_a_checkpoint_within_it() -> None:
    current = EpochProgress(epoch=2, first_step=20, position=3)
    for rate in (0.25, 0.5):
        current.rates.add(rate)
    state = json.loads(json.dumps(Progress(step=22, epoch=1, current=current).state()))
    restored = Progress.from_state(state).current
    assert restored is not None
    assert restored.rates == current.rates
    del state["within"]["rates"]  # as in checkpoints of before
    older = Progress.from_state(state).current
    assert older is not None
    assert older.rates.updates == 0
