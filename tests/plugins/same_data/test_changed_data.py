"""A training that continues with other data: refused within an epoch, noted between epochs, accepted where the user says so."""

import os
import shutil
from collections import Counter
from pathlib import Path

import h5py
import numpy
import pytest
import torch
from conftest import write_corpus
from launching import TOY

from hvdtrain.errors import CheckpointError, HvdtrainError
from hvdtrain.run import train
from hvdtrain.settings import read_settings

SEQUENCES, BATCH = 20, 4


def run(folder: Path, **overrides: object) -> None:
    """Train in this process."""
    texts = {"corpus": folder, "max_seqs": BATCH, "model": folder / "model", "record": folder / "record", **overrides}
    train(read_settings([TOY], {name: str(value) for name, value in texts.items()}))


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with a corpus, and a training that ended within epoch 1, with the checkpoint after its step 3."""
    write_corpus(tmp_path / "train.hdf", SEQUENCES, 0)
    write_corpus(tmp_path / "dev.hdf", 5, 1)
    with pytest.raises(HvdtrainError, match="twice"):
        run(tmp_path, fault="mistake,0,3", save_interval_steps=1, evaluated=True)
    assert (tmp_path / "model.001.step-3.pt").exists()
    (tmp_path / "record.0").unlink()
    return tmp_path


def trained_on(folder: Path) -> Counter[str]:
    return Counter((folder / "record.0").read_text().splitlines())


def other_values(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["inputs"].write_direct(file["inputs"][:] + 1)
    os.utime(path, ns=(0, 0))


def test_other_values_within_an_epoch(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other_values(begun / "train.hdf")
    with pytest.raises(CheckpointError) as refused:
        run(begun)
    told = str(refused.value)
    changed = f"other values in sequence 'seq-0' of {begun}/train.hdf, modified 19"
    assert told.startswith(f"train: expected the data that epoch 1 began with, got {changed}")
    assert "++accept_changed_data 1" in told
    assert "\n" not in told
    assert not (begun / "record.0").exists()
    run(begun, accept_changed_data=1)
    assert "train: other data than in the checkpoint: other values in sequence 'seq-0' of " in capsys.readouterr().out
    assert trained_on(begun).total() == SEQUENCES - 3 * BATCH
    run(begun, num_epochs=2)  # which is now the data of the checkpoint
    assert "other data" not in capsys.readouterr().out


def test_more_data_within_an_epoch(begun: Path) -> None:
    write_corpus(begun / "more.hdf", SEQUENCES + 8, 0)
    with pytest.raises(CheckpointError, match=f"got {SEQUENCES + 8} sequences instead of {SEQUENCES} in .*more.hdf"):
        run(begun, part="more.hdf")
    run(begun, part="more.hdf", accept_changed_data=1)
    assert trained_on(begun).total() == SEQUENCES + 8 - 3 * BATCH


def test_the_same_data_elsewhere_and_other_data_to_evaluate(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copyfile(begun / "train.hdf", begun / "copy.hdf")
    other_values(begun / "dev.hdf")
    run(begun, part="copy.hdf", evaluated=True)
    told = capsys.readouterr().out
    assert "dev: other data than in the checkpoint: other values in sequence 'seq-0' of " in told
    assert "train: other data" not in told
    assert trained_on(begun).total() == SEQUENCES - 3 * BATCH


def test_a_file_that_was_only_copied(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(begun / "train.hdf", ns=(0, 0))
    run(begun)
    assert f"train: {begun}/train.hdf: written since the checkpoint; lengths, tags and some values" in capsys.readouterr().out
    assert trained_on(begun).total() == SEQUENCES - 3 * BATCH


def test_other_data_between_epochs_is_noted(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(begun)
    other_values(begun / "train.hdf")
    run(begun, num_epochs=2)
    assert "train: other data than in the checkpoint: other values in sequence 'seq-0' of " in capsys.readouterr().out
    assert [line.split()[0] for line in trained_on(begun)].count("2") == SEQUENCES


def test_a_checkpoint_that_does_not_say_what_the_data_was(begun: Path) -> None:
    for name in ("model.001.step-3.pt", "model.001.step-3.opt.pt"):
        contents = torch.load(begun / name, weights_only=True)
        assert list(contents.pop("data")) == ["train", "dev"]
        torch.save(contents, begun / name)
    other_values(begun / "train.hdf")
    run(begun)
    assert trained_on(begun).total() == SEQUENCES - 3 * BATCH
    assert numpy.isfinite(torch.load(begun / "model.001.pt", weights_only=True)["history"][0]["scores"]["train_loss_ce"])
