"""Checkpoints: whole or not there."""

import resource
from pathlib import Path

import pytest
import torch

from hvdtrain.checkpoint.folder import UNFINISHED, CheckpointFolder
from hvdtrain.errors import CheckpointError


def write(model_file: Path, optimizer_file: Path) -> None:
    model_file.write_text("model")
    optimizer_file.write_text("optimizer")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_names_are_those_of_returnn() -> None:
    checkpoint = CheckpointFolder(Path("exp/net")).at(7)
    assert checkpoint.epoch == 7
    assert (str(checkpoint.model_file), str(checkpoint.optimizer_file)) == ("exp/net.007.pt", "exp/net.007.opt.pt")
    assert str(CheckpointFolder(Path("net"), "weights.h5").at(1234).optimizer_file) == "net.1234.opt.weights.h5"


def test_both_files_are_saved_in_a_folder_that_is_made(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "exp" / "deep" / "net")
    saved = checkpoints.save(3, write)
    assert saved == checkpoints.at(3)
    assert names(tmp_path / "exp" / "deep") == ["net.003.opt.pt", "net.003.pt"]
    assert (saved.model_file.read_text(), saved.optimizer_file.read_text()) == ("model", "optimizer")


def test_nothing_has_its_final_name_before_everything_is_written(tmp_path: Path) -> None:
    def watching(model_file: Path, optimizer_file: Path) -> None:
        write(model_file, optimizer_file)
        assert names(tmp_path) == [f"net.001.opt.pt{UNFINISHED}", f"net.001.pt{UNFINISHED}"]
        assert CheckpointFolder(tmp_path / "net").newest() is None

    CheckpointFolder(tmp_path / "net").save(1, watching)
    assert names(tmp_path) == ["net.001.opt.pt", "net.001.pt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_write_that_fails_leaves_the_older_checkpoint_and_nothing_else(tmp_path: Path, error: Exception) -> None:
    def failing(model_file: Path, optimizer_file: Path) -> None:
        model_file.write_text("half of the mod")
        raise error

    checkpoints = CheckpointFolder(tmp_path / "net")
    checkpoints.save(1, write)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.save(2, failing)
    assert str(caught.value) == f"{tmp_path / 'net.002.pt'}: expected to write a checkpoint, got: {error}"
    assert names(tmp_path) == ["net.001.opt.pt", "net.001.pt"]
    assert checkpoints.newest() == checkpoints.at(1)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """As far as a test can fill one; torch says `unexpected pos 64 vs 0`."""

    def too_much(model_file: Path, optimizer_file: Path) -> None:
        torch.save({"step": 1}, optimizer_file)
        torch.save({"weight": torch.zeros(1_000_000)}, model_file)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    checkpoints = CheckpointFolder(tmp_path / "net")
    try:
        for save in (
            lambda: checkpoints.save(1, too_much),
            lambda: checkpoints.save_own(tmp_path / "net.own", lambda path: too_much(path, path)),
        ):
            with pytest.raises(
                CheckpointError, match=rf"^{tmp_path}/net\.\S+: expected to write a checkpoint, got: .*File too large"
            ):
                save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [name for name in names(tmp_path) if not name.endswith(UNFINISHED)]


def test_a_write_that_makes_only_one_file_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"net.001.pt: expected to write a checkpoint"):
        CheckpointFolder(tmp_path / "net").save(1, lambda model_file, optimizer_file: optimizer_file.write_text("optimizer"))
    assert names(tmp_path) == []


def test_the_model_file_gets_its_name_last(tmp_path: Path) -> None:
    def blocking(model_file: Path, optimizer_file: Path) -> None:
        write(model_file, optimizer_file)
        (tmp_path / "net.001.pt").mkdir()  # in the way of the model file only

    with pytest.raises(CheckpointError, match=r"net.001.pt: expected to write a checkpoint, got: .*Is a directory"):
        CheckpointFolder(tmp_path / "net").save(1, blocking)
    assert names(tmp_path) == ["net.001.opt.pt", "net.001.pt"]  # the optimizer file had been renamed already


def test_what_a_killed_run_left_behind_is_removed(tmp_path: Path) -> None:
    for name in (f"net.004.pt{UNFINISHED}", f"net.004.opt.pt{UNFINISHED}", f"other.004.pt{UNFINISHED}", "net.004.pt.mine"):
        (tmp_path / name).write_text("left behind")
    checkpoints = CheckpointFolder(tmp_path / "net")
    assert checkpoints.newest() is None
    checkpoints.save(5, write)
    assert names(tmp_path) == ["net.004.pt.mine", "net.005.opt.pt", "net.005.pt", f"other.004.pt{UNFINISHED}"]


def test_saving_again_replaces_the_files(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    (tmp_path / "net.001.pt").write_text("old")
    (tmp_path / "net.001.opt.pt").write_text("old")
    assert checkpoints.save(1, write).model_file.read_text() == "model"
    assert checkpoints.at(1).optimizer_file.read_text() == "optimizer"


def test_newest_counts_epochs_as_numbers(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    assert checkpoints.newest() is None
    for epoch in (2, 10, 999, 1000):
        checkpoints.save(epoch, write)
        newest = checkpoints.newest()
        assert newest is not None
        assert newest.epoch == epoch


def test_newest_skips_models_without_optimizer(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    for epoch in (1, 2, 3):
        checkpoints.save(epoch, write)
    checkpoints.at(3).optimizer_file.unlink()
    assert checkpoints.newest() == checkpoints.at(2)
    checkpoints.at(2).model_file.unlink()  # killed between the two renames
    assert checkpoints.newest() is None  # epoch 1's optimizer has been removed as too old


def test_newest_is_not_misled_by_other_files(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net.v1")
    (tmp_path / "net.v1.008.opt.pt").touch()
    for name in ("net.v1.007.pt", "netXv1.008.pt", "net.v1.009.txt", "net.v1.best.pt", "my-net.v1.010.pt", "net.v1.011.pt.bak"):
        (tmp_path / name).touch()
        (tmp_path / name.replace(".pt", ".opt.pt")).touch()
    assert checkpoints.newest() == checkpoints.at(7)


def test_a_folder_that_is_not_there_has_no_newest(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path / "none" / "net").newest() is None


def test_two_optimizer_files_are_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    for epoch in range(1, 5):
        checkpoints.save(epoch, write)
    assert names(tmp_path) == [
        "net.001.pt",
        "net.002.pt",
        "net.003.opt.pt",
        "net.003.pt",
        "net.004.opt.pt",
        "net.004.pt",
    ]


def test_optimizer_files_of_returnn_stay(tmp_path: Path) -> None:
    """Its runs may go on from them; they are told by the version that RETURNN notes in them."""
    checkpoints = CheckpointFolder(tmp_path / "net")
    checkpoints.save(1, write)
    torch.save({"optimizer": {}, "epoch": 1, "returnn_version": "1.20260101"}, checkpoints.at(1).optimizer_file)
    torch.save({"optimizer": {}, "epoch": 2}, checkpoints.save(2, write).optimizer_file)
    for epoch in range(3, 6):
        checkpoints.save(epoch, write)
    assert [name for name in names(tmp_path) if ".opt" in name] == ["net.001.opt.pt", "net.004.opt.pt", "net.005.opt.pt"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"net.001.pt: expected to write a checkpoint, got: "):
        CheckpointFolder(tmp_path / "file" / "net").save(1, write)


def test_a_checkpoint_within_an_epoch_is_newer_than_the_epoch_before_and_older_than_its_end(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    checkpoints.save(3, write)
    own = checkpoints.at(4, 90).own_file(1, 2)
    checkpoints.save_own(own, lambda path: path.touch())
    for step in (80, 100, 90):  # a run that went on from an older one
        checkpoints.save(4, write, step=step)
        assert checkpoints.newest() == checkpoints.at(4, step)
    assert names(tmp_path) == [
        "net.003.opt.pt",
        "net.003.pt",
        "net.004.step-90.opt.pt",
        "net.004.step-90.pt",
    ]
    checkpoints.at(4, 90).model_file.unlink()  # killed while it was removed
    checkpoints.save(4, write)
    assert checkpoints.newest() == checkpoints.at(4)
    assert names(tmp_path) == ["net.003.opt.pt", "net.003.pt", "net.004.opt.pt", "net.004.pt"]


def test_what_ranks_write_of_their_own_belongs_to_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    for step in (80, 90):
        for rank in range(2):
            checkpoints.save_own(checkpoints.at(4, step).own_file(rank, 2), lambda path: path.touch())
        checkpoints.save(4, write, step=step)
        assert names(tmp_path) == [f"net.004.step-{step}.{part}pt" for part in ("opt.", "", "rank-0-of-2.", "rank-1-of-2.")]
