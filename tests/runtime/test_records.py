"""Whose records are in a folder with models of several trainings."""

import json
from pathlib import Path

from launching import hvdtrain

from hvdtrain.checkpoint.lock import lock_model, other_locks
from hvdtrain.plugins.report.project import find_trainings
from hvdtrain.runtime.records import claim_records, records_of

TWO = """
import torch
from torch import nn

train = {"class": "DummyDataset", "input_dim": 2, "output_dim": 3, "num_seqs": 8, "seq_len": 3}
dev, num_epochs, batch_size, learning_rate, num_threads, optimizer = train, 3, 20, 0.1, 1, {"class": "sgd"}
cleanup_old_models = False
offset = config.int("offset", 0)  # of the loss: b's best epoch is another one


def get_model(**_):
    return nn.Linear(2, 3)


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    frames = model(extern_data["data"].raw_tensor).flatten(0, 1)
    loss = nn.functional.cross_entropy(frames, extern_data["classes"].raw_tensor.flatten().long(), reduction="none")
    context.mark_as_loss(loss * 0 + context.epoch * (-1) ** offset + loss * 1e-6, "ce")


import hvdtrain
"""


def test_two_models_in_a_folder_have_records_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    for name, offset in (("a", 0), ("b", 1)):
        ended = hvdtrain(tmp_path / "two.py", {"model": tmp_path / "exp" / name, "offset": offset})
        assert ended.status == 0, ended.err
    assert f"the other records of this one are in {tmp_path}/exp/b.records" in ended.out
    for name, records, best in (("a", "exp", 1), ("b", "exp/b.records", 3)):
        assert json.loads((tmp_path / records / "best.json").read_text())["saved"]["epoch"] == best
        assert len((tmp_path / records / "scores.jsonl").read_text().splitlines()) == 3
        assert len((tmp_path / records / "ends.jsonl").read_text().splitlines()) == 1
        ended = hvdtrain(tmp_path / "two.py", {"model": tmp_path / "exp" / name, "task": "eval", "load_epoch": "best"})
        assert f"{name}.00{best}.pt" in ended.out, ended.out
    assert find_trainings(tmp_path) == [tmp_path / "exp", tmp_path / "exp/b.records"]


def test_the_first_keeps_what_trainings_have_shared(tmp_path: Path) -> None:
    folder = tmp_path
    assert records_of(folder / "a") == folder
    (folder / "scores.jsonl").touch()
    (folder / "a.001.opt.pt").touch()
    assert [records_of(folder / name) for name in "ab"] == [folder, folder / "b.records"]
    (folder / "b.001.opt.pt").touch()
    assert [records_of(folder / name) for name in "ab"] == [folder, folder]  # of a release without starts.jsonl: unknown
    starts = [json.dumps({"settings": {"model": [f"'exp/{name}'", "config.py"]}}) for name in "ab"]
    (folder / "starts.jsonl").write_text("\n".join(starts) + "\n")
    assert [records_of(folder / name) for name in "ab"] == [folder, folder / "b.records"]


def test_two_that_begin_at_once_have_records_of_their_own(tmp_path: Path) -> None:
    for name in ("package", "uv"):  # of other programs
        (tmp_path / f"{name}.lock").write_text("version = 1\n")
    with lock_model(tmp_path / "a"):
        assert other_locks(tmp_path / "a") == []
        with lock_model(tmp_path / "b"):
            for name in "ab":
                claim_records(tmp_path / name, is_alone=not other_locks(tmp_path / name))
    claim_records(tmp_path / "c", is_alone=True)
    assert [records_of(tmp_path / name) for name in "abc"] == [tmp_path / "a.records", tmp_path / "b.records", tmp_path]
