"""Checkpoints: whole or not there."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.disk.atomic import UNFINISHED
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.contents import CheckpointContents
from hvdtrain.learner.torch.model_file import file_format

TORCH = file_format(torch.device("cpu"), "pt")


def write(model_file: Path, optimizer_file: Path) -> None:
    model_file.write_text("model")
    optimizer_file.write_text("optimizer")


class Contents(CheckpointContents):
    """Written by a function of a test."""

    def __init__(self, write: Callable[[Path, Path], object]) -> None:
        object.__setattr__(self, "write", write)


def save(
    checkpoints: CheckpointFolder, epoch: int, write: Callable[[Path, Path], object] = write, step: int | None = None
) -> Checkpoint:
    target = checkpoints.new(epoch, step)
    checkpoints.write(target, Contents(write))
    return target


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_names_are_those_of_returnn() -> None:
    checkpoint = CheckpointFolder(Path("exp/net")).checkpoint_at(7)
    assert checkpoint.epoch == 7
    assert (str(checkpoint.model_file), str(checkpoint.optimizer_file)) == ("exp/net.007.pt", "exp/net.007.opt.pt")
    assert str(CheckpointFolder(Path("net"), "weights.h5").checkpoint_at(1234).optimizer_file) == "net.1234.opt.weights.h5"


def test_both_files_are_saved_in_a_folder_that_is_made(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "exp" / "deep" / "net")
    saved = save(checkpoints, 3)
    assert saved == checkpoints.checkpoint_at(3)
    assert names(tmp_path / "exp" / "deep") == ["net.003.opt.pt", "net.003.pt"]
    assert (saved.model_file.read_text(), saved.optimizer_file.read_text()) == ("model", "optimizer")


def test_nothing_has_its_final_name_before_everything_is_written(tmp_path: Path) -> None:
    def watching(model_file: Path, optimizer_file: Path) -> None:
        write(model_file, optimizer_file)
        assert names(tmp_path) == [f"net.001.opt.pt{UNFINISHED}", f"net.001.pt{UNFINISHED}"]
        assert CheckpointFolder(tmp_path / "net").newest() is None

    save(CheckpointFolder(tmp_path / "net"), 1, watching)
    assert names(tmp_path) == ["net.001.opt.pt", "net.001.pt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_write_that_fails_leaves_the_older_checkpoint_and_nothing_else(tmp_path: Path, error: Exception) -> None:
    def failing(model_file: Path, optimizer_file: Path) -> None:
        model_file.write_text("half of the mod")
        raise error

    checkpoints = CheckpointFolder(tmp_path / "net")
    save(checkpoints, 1)
    with pytest.raises(CheckpointError) as caught:
        save(checkpoints, 2, failing)
    assert str(caught.value).startswith(f"{tmp_path / 'net.002.pt'}: expected to write a checkpoint, got: {error}")
    assert (" free there; with more, the same command continues" in str(caught.value)) == isinstance(error, OSError)
    assert names(tmp_path) == ["net.001.opt.pt", "net.001.pt"]
    assert checkpoints.newest() == checkpoints.checkpoint_at(1)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """As far as a test can fill one; torch says `unexpected pos 64 vs 0`."""

    large = {"weight": torch.zeros(1_000_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    checkpoints = CheckpointFolder(tmp_path / "net")
    try:
        for save in (
            lambda: checkpoints.write(checkpoints.new(1), CheckpointContents(large, {}, {"step": 1}, TORCH)),
            lambda: checkpoints.write_rank(tmp_path / "net.own", lambda file: TORCH.write(file, large)),
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
        save(CheckpointFolder(tmp_path / "net"), 1, lambda model_file, optimizer_file: optimizer_file.write_text("optimizer"))
    assert names(tmp_path) == []


def test_the_model_file_gets_its_name_last(tmp_path: Path) -> None:
    def blocking(model_file: Path, optimizer_file: Path) -> None:
        write(model_file, optimizer_file)
        (tmp_path / "net.001.pt").mkdir()  # in the way of the model file only

    with pytest.raises(CheckpointError, match=r"net.001.pt: expected to write a checkpoint, got: .*Is a directory"):
        save(CheckpointFolder(tmp_path / "net"), 1, blocking)
    assert names(tmp_path) == ["net.001.opt.pt", "net.001.pt"]  # the optimizer file had been renamed already


def test_what_a_killed_run_left_behind_is_removed(tmp_path: Path) -> None:
    for name in (f"net.004.pt{UNFINISHED}", f"net.004.opt.pt{UNFINISHED}", f"other.004.pt{UNFINISHED}", "net.004.pt.mine"):
        (tmp_path / name).write_text("left behind")
    checkpoints = CheckpointFolder(tmp_path / "net")
    assert checkpoints.newest() is None
    save(checkpoints, 5)
    assert names(tmp_path) == ["net.004.pt.mine", "net.005.opt.pt", "net.005.pt", f"other.004.pt{UNFINISHED}"]


def test_saving_again_replaces_the_files(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    (tmp_path / "net.001.pt").write_text("old")
    (tmp_path / "net.001.opt.pt").write_text("old")
    assert save(checkpoints, 1).model_file.read_text() == "model"
    assert checkpoints.checkpoint_at(1).optimizer_file.read_text() == "optimizer"


def test_newest_counts_epochs_as_numbers(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    assert checkpoints.newest() is None
    for epoch in (2, 10, 999, 1000):
        save(checkpoints, epoch)
        newest = checkpoints.newest()
        assert newest is not None
        assert newest.epoch == epoch


def test_newest_skips_models_without_optimizer(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    for epoch in (1, 2, 3):
        save(checkpoints, epoch)
    checkpoints.checkpoint_at(3).optimizer_file.unlink()
    assert checkpoints.newest() == checkpoints.checkpoint_at(2)
    checkpoints.checkpoint_at(2).model_file.unlink()  # killed between the two renames
    assert checkpoints.newest() is None  # epoch 1's optimizer has been removed as too old


def test_newest_is_not_misled_by_other_files(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net.v1")
    (tmp_path / "net.v1.008.opt.pt").touch()
    for name in ("net.v1.007.pt", "netXv1.008.pt", "net.v1.009.txt", "net.v1.best.pt", "my-net.v1.010.pt", "net.v1.011.pt.bak"):
        (tmp_path / name).touch()
        (tmp_path / name.replace(".pt", ".opt.pt")).touch()
    assert checkpoints.newest() == checkpoints.checkpoint_at(7)


def test_a_folder_that_is_not_there_has_no_newest(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path / "none" / "net").newest() is None


def test_two_optimizer_files_are_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    for epoch in range(1, 5):
        save(checkpoints, epoch)
    assert names(tmp_path) == [
        "net.001.pt",
        "net.002.pt",
        "net.003.opt.pt",
        "net.003.pt",
        "net.004.opt.pt",
        "net.004.pt",
    ]


def test_optimizer_files_of_returnn_stay(tmp_path: Path) -> None:
    """Its runs may continue from them; they are told by the version that RETURNN notes in them."""
    checkpoints = CheckpointFolder(tmp_path / "net")
    save(checkpoints, 1)
    torch.save({"optimizer": {}, "epoch": 1, "returnn_version": "1.20260101"}, checkpoints.checkpoint_at(1).optimizer_file)
    torch.save({"optimizer": {}, "epoch": 2}, save(checkpoints, 2).optimizer_file)
    for epoch in range(3, 6):
        save(checkpoints, epoch)
    assert [name for name in names(tmp_path) if ".opt" in name] == ["net.001.opt.pt", "net.004.opt.pt", "net.005.opt.pt"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"net.001.pt: expected to write a checkpoint, got: "):
        save(CheckpointFolder(tmp_path / "file" / "net"), 1)


def test_a_checkpoint_within_an_epoch_is_newer_than_the_epoch_before_and_older_than_its_end(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    save(checkpoints, 3)
    own = checkpoints.checkpoint_at(4, 90).rank_file(1, 2)
    checkpoints.write_rank(own, Path.touch)
    for step in (80, 100, 90):  # a run that went on from an older one
        save(checkpoints, 4, step=step)
        assert checkpoints.newest() == checkpoints.checkpoint_at(4, step)
    assert names(tmp_path) == [
        "net.003.opt.pt",
        "net.003.pt",
        "net.004.step-90.opt.pt",
        "net.004.step-90.pt",
    ]
    checkpoints.checkpoint_at(4, 90).model_file.unlink()  # killed while it was removed
    save(checkpoints, 4)
    assert checkpoints.newest() == checkpoints.checkpoint_at(4)
    assert names(tmp_path) == ["net.003.opt.pt", "net.003.pt", "net.004.opt.pt", "net.004.pt"]


def test_what_ranks_write_of_their_own_belongs_to_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "net")
    for step in (80, 90):
        for rank in range(2):
            checkpoints.write_rank(checkpoints.checkpoint_at(4, step).rank_file(rank, 2), Path.touch)
        save(checkpoints, 4, step=step)
        assert names(tmp_path) == [f"net.004.step-{step}.{part}pt" for part in ("opt.", "", "rank-0-of-2.", "rank-1-of-2.")]
