"""A mirror of checkpoints on object storage: there, too, a checkpoint is complete or absent."""

import json
import shutil
from pathlib import Path

import pytest
from launching import TOY, faults, hvdtrain
from object_store import ObjectStore, Request
from trainings import assert_same, read_model, saved_model

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.keys import SavingKeys
from hvdtrain.config.check import build
from hvdtrain.errors import CheckpointError
from hvdtrain.plugins.remote.mirror import Mirror


def files_in(store: ObjectStore) -> set[str]:
    return {name.removeprefix("exp/") for name in store.names()}


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("model.*.pt")}


def test_a_training_goes_on_from_its_mirror_after_its_disk_is_lost(store: ObjectStore, corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "evaluated": True, "save_interval_steps": 12, "num_epochs": 4}
    assert hvdtrain(TOY, {**keys, "model": tmp_path / "whole" / "model"}).status == 0
    store.fault = lambda request: ["refuse", "lose", ""][min(request.number, 2)] if request.method == "PUT" else ""
    mirrored = {**keys, "model": tmp_path / "first" / "model", "checkpoint_mirror": store.url("exp")}
    first = hvdtrain(TOY, {**mirrored, "num_epochs": 3})
    assert first.status == 0, first.err
    after_three = files_of(tmp_path / "whole") - {"model.004.pt", "model.004.opt.pt"} | {"model.002.opt.pt"}
    assert files_in(store) == files_of(tmp_path / "first") == after_three
    assert all(store.get(f"exp/{name}") == (tmp_path / "first" / name).read_bytes() for name in files_in(store))
    shutil.rmtree(tmp_path / "first")
    second = hvdtrain(TOY, {**mirrored, "load": tmp_path / "whole" / "model.001"})  # which is for a training without a checkpoint
    assert second.status == 0, second.err
    assert "Fetched " in second.out
    assert "model.003.pt: training continues after epoch 3" in second.out
    assert_same(saved_model(tmp_path / "first" / "model", 4), saved_model(tmp_path / "whole" / "model", 4))
    assert files_of(tmp_path / "first") == {"model.003.pt", "model.003.opt.pt", "model.004.pt", "model.004.opt.pt"}
    assert files_in(store) == files_of(tmp_path / "whole")  # the optimizer of epoch 2, which is not on the disk, is removed, too
    evaluated = hvdtrain(TOY, {**mirrored, "task": "eval", "model": tmp_path / "third" / "model"})
    assert evaluated.status == 0, evaluated.err
    assert "Loaded " in evaluated.out
    assert files_of(tmp_path / "third") == {"model.004.pt", "model.004.opt.pt"}


WITHIN: dict[str, object] = {
    "evaluated": True,
    "eval_interval_steps": 6,
    "learning_rate": 20.0,
    "learning_rate_schedule": {"class": "constant", "num_warmup_steps": 60},
    "optimizer": {"class": "sgd"},
    "losses": "mean",
    "running_average": 3,
    "average_checkpoints": [{"best": 2}, {"last": 2}, {"running": 2}, {"steps": [6]}],
    "cleanup_old_models": {"keep_last_n": 1, "keep_best_n": 0, "keep": []},
}
"""The model gets worse as the learning rate rises, so that the best one is within an epoch."""


@pytest.mark.parametrize(
    "stop", [pytest.param("between", marks=pytest.mark.again), pytest.param("within", marks=pytest.mark.slow)]
)
def test_averages_need_no_model_that_only_the_lost_disk_had(stop: str, store: ObjectStore, corpus: Path, tmp_path: Path) -> None:
    """With evaluations within epochs and with cleanup; after a stop between two epochs, or within one."""
    keys = {"corpus": corpus, "num_epochs": 3, **WITHIN}
    whole = hvdtrain(TOY, {**keys, "model": tmp_path / "whole" / "model"})
    assert whole.status == 0, whole.err
    mirrored = {**keys, "model": tmp_path / "first" / "model", "checkpoint_mirror": store.url("exp")}
    broken = {"num_epochs": 2} if stop == "between" else {"save_interval_steps": 8, "fault": "raise,0,51"}
    first = hvdtrain(TOY, {**mirrored, **broken})
    assert first.status == (0 if stop == "between" else 1), first.err
    shutil.rmtree(tmp_path / "first")
    second = hvdtrain(TOY, mirrored)
    assert second.status == 0, second.err
    made = {folder: json.loads((tmp_path / folder / "averages.json").read_text()) for folder in ("whole", "first")}
    assert made["first"] == made["whole"]
    assert [one["name"] for one in made["whole"]] == ["best-2", "last-2", "running-2", "steps-6"]
    assert "step-" in made["whole"][0]["of"][0], "the test wants a best model within an epoch"
    best = [json.loads((tmp_path / folder / "best.json").read_text()) for folder in ("whole", "first")]
    assert best[0]["file"] == best[1]["file"]
    for one in made["whole"]:
        average = one["file"].split(".")[1]
        assert_same(*(read_model(tmp_path / folder / f"model.{average}.pt") for folder in ("whole", "first")))
    kept = {path.name for path in (tmp_path / "whole").glob("model.*")}
    unneeded = {"model.002.opt.pt"} if stop == "within" else set()
    assert {path.name for path in (tmp_path / "first").glob("model.*")} == kept - unneeded
    assert files_in(store) == kept


def test_an_upload_that_fails_leaves_the_checkpoint_before(store: ObjectStore, corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "num_epochs": 2, "model": tmp_path / "model", "checkpoint_mirror": store.url("exp")}
    checkpoints = CheckpointFolder(tmp_path / "model", "pt")

    def break_last(request: Request) -> str:
        return "refuse" if (request.method, request.path) == ("PUT", "exp/model.002.pt") else ""

    store.fault = break_last
    failed = hvdtrain(TOY, keys)
    assert failed.status == 2
    assert f"checkpoint_mirror: {store.url('exp/model.002.pt')}: expected to store a file, got: " in failed.err
    assert f"(tried 3 times) ({tmp_path / 'model.002.pt'} is written, and can be loaded)" in failed.err
    newest = checkpoints.newest_of(list(files_in(store)))
    assert newest is not None
    assert newest.epoch == 1
    assert "model.002.pt" not in files_in(store)
    store.fault = lambda request: ""
    again = hvdtrain(TOY, {**keys, "num_epochs": 3})
    assert again.status == 0, again.err
    assert "Fetched " not in again.out  # the checkpoint on disk is newer
    assert "training continues after epoch 2" in again.out


def test_a_checkpoint_is_fetched_whole_or_not_at_all(store: ObjectStore, tmp_path: Path) -> None:
    store.put("exp/model.001.pt", bytes(1000))
    mirror = Mirror(store.url("exp/"))
    store.fault = lambda request: "cut" if request.part.startswith("bytes") else ""
    with pytest.raises(CheckpointError, match=r"^checkpoint_mirror: .*model.001.pt: expected a file that can be read, got: "):
        mirror.download("model.001.pt", tmp_path)
    assert list(tmp_path.iterdir()) == []
    store.fault = lambda request: "cut" if request.part.startswith("bytes") and not request.number % 2 else ""
    store.forget()
    mirror.download("model.001.pt", tmp_path)
    assert (tmp_path / "model.001.pt").read_bytes() == bytes(1000)
    mirror.remove("model.001.pt")
    mirror.remove("model.001.pt")
    assert mirror.names() == []


def test_what_can_be_a_mirror() -> None:
    for wrong in ("exp/g2p", "https://host/exp", "file:///exp"):
        assert faults(build(SavingKeys, {"checkpoint_mirror": wrong}, "", {})[1]) == ["checkpoint_mirror: wrong-format"]
    assert build(SavingKeys, {"checkpoint_mirror": "gs://bucket/exp"}, "", {})[1] == []
