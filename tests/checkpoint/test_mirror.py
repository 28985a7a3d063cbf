"""A mirror of checkpoints on object storage: there, too, a checkpoint is complete or absent."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import TOY, faults, hvdtrain
from object_store import ObjectStore, Request, object_store
from trainings import assert_same, saved_model

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.keys import SavingKeys
from hvdtrain.checkpoint.mirror import Mirror
from hvdtrain.config.check import build
from hvdtrain.data import remote
from hvdtrain.errors import CheckpointError


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(running: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    running.clear()
    monkeypatch.setattr(remote, "TIMEOUT", 5.0)
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.01))
    return running


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
    second = hvdtrain(TOY, mirrored)
    assert second.status == 0, second.err
    assert "Fetched " in second.out
    assert "model.003.pt: training goes on after epoch 3" in second.out
    assert_same(saved_model(tmp_path / "first" / "model", 4), saved_model(tmp_path / "whole" / "model", 4))
    assert files_of(tmp_path / "first") == {"model.003.pt", "model.003.opt.pt", "model.004.pt", "model.004.opt.pt"}
    assert files_in(store) == files_of(tmp_path / "whole")  # the optimizer of epoch 2, which is not on the disk, is removed, too
    evaluated = hvdtrain(TOY, {**mirrored, "task": "eval", "model": tmp_path / "third" / "model"})
    assert evaluated.status == 0, evaluated.err
    assert "Loaded " in evaluated.out
    assert files_of(tmp_path / "third") == {"model.004.pt", "model.004.opt.pt"}


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
    assert "training goes on after epoch 2" in again.out


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
