"""A local disk for checkpoints: the newest one is whole in one of two places at any moment, and a start finds it."""

import os
import signal
import time
from pathlib import Path

import pytest
from launching import TOY
from trainings import Run, Trained, Trainings, assert_same, saved_model, trains

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.disk.atomic import UNFINISHED
from hvdtrain.errors import CheckpointError
from hvdtrain.plugins.local_disk.disk import LocalDisk, copy_newest, local_prefix
from hvdtrain.run import train
from hvdtrain.settings import read_settings

TWO = Run("torch", "horovod", 2)

MOVED = '''
from pathlib import Path

import hvdtrain
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.plugins.local_disk.disk import FilesOnDisk, LocalDisk, local_prefix


def startup_callback(**_):
    """As if rank 0 had been killed before its newest checkpoint was copied from the disk."""
    checkpoints = CheckpointFolder(Path(config.value("model")))
    newest = checkpoints.newest()
    if hvdtrain.rank() == 0 and newest is not None:
        disk = CheckpointFolder(local_prefix(config.value("checkpoint_local"), checkpoints.prefix))
        LocalDisk(disk, checkpoints, is_awaited=True).write(newest, FilesOnDisk(newest, []))
        newest.model_file.unlink()
        newest.optimizer_file.unlink()
'''


COMMON: dict[str, object] = {
    "horovod_reduce_type": "param",
    "horovod_param_sync_step": 7,
    "optimizer": {"class": "adam"},
    "running_average": 3,
    "num_epochs": 2,
    "save_interval_steps": 6,
}


def on_a_disk(folder: Path) -> dict[str, object]:
    (folder / "moved.py").write_text(MOVED)
    return {**COMMON, "configs": [TOY, folder / "moved.py"], "checkpoint_local": folder / "disk"}


@trains(TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"whole": COMMON, "local": {**on_a_disk(folder), "fault": "SIGTERM,0,3,30"}}


@trains(slow=[TWO])
def in_background(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"background": {**on_a_disk(folder), "fault": "SIGTERM,0,30", "save_in_background": True}}


@pytest.mark.parametrize(
    ("function", "name", "stops"),
    [(trainings, "local", 2), pytest.param(in_background, "background", 1, marks=pytest.mark.slow)],
)
def test_a_training_goes_on_from_the_disk_of_rank_zero(function: Trainings, name: str, stops: int, trained: Trained) -> None:
    whole, made = trained(trainings, TWO), trained(function, TWO)
    assert made.out(name).count(" and its other files from ") == made.out(name).count("stopped by SIGTERM") == stops
    assert_same(whole.weights("whole"), made.weights(name))
    assert_same(saved_model(whole.models["whole"], 2), saved_model(made.models[name], 2))
    assert [path.name for path in sorted(made.models[name].parent.iterdir())] == [
        path.name for path in sorted(whole.models["whole"].parent.iterdir())
    ]
    assert list((made.folder / "disk").iterdir()) == []


class Letters:
    """What a checkpoint is made of in this test: one letter, many times."""

    def __init__(self, letter: int, size: int = 4 << 20) -> None:
        self.bytes = bytes([letter % 256]) * size

    def write(self, model_file: Path, optimizer_file: Path) -> None:
        for file in (model_file, optimizer_file):
            file.write_bytes(self.bytes)

    def write_running(self, file: Path) -> bool:
        file.write_bytes(self.bytes)
        return True


def places(folder: Path) -> tuple[CheckpointFolder, LocalDisk]:
    checkpoints = CheckpointFolder(folder / "exp" / "model")
    return checkpoints, LocalDisk(CheckpointFolder(local_prefix(str(folder / "disk"), checkpoints.prefix)), checkpoints, True)


def save(folder: Path, step: int) -> None:
    checkpoints, local = places(folder)
    target = checkpoints.new(1, step)
    local.copy(target, local.write(target, Letters(step)), set())


def newest_step(folder: Path) -> int:
    """That of the newest checkpoint, once a start has looked for it in both places; all of its files have to be from it."""
    checkpoints, local = places(folder)
    copy_newest(SingleCommunicator(), checkpoints, local)
    newest = checkpoints.newest()
    assert newest is not None
    step = newest.step or 0
    files = (newest.model_file, newest.optimizer_file, newest.running_file)
    assert all(file.read_bytes() == Letters(step).bytes for file in files)
    assert not checkpoints.note.exists()
    assert list((folder / "disk").iterdir()) == []
    return step


def test_a_kill_during_the_copy_loses_nothing(tmp_path: Path) -> None:
    step, (checkpoints, _) = 0, places(tmp_path)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            while True:
                step += 1
                save(tmp_path, step)
        try:
            deadline = time.monotonic() + 60
            while not any(path.name.endswith(f"pt{UNFINISHED}") for path in files_in(checkpoints.folder)):
                assert time.monotonic() < deadline
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert checkpoints.note.exists(), "the copy is under way"
        on_disk = max(int(path.name.split("-")[1].split(".")[0]) for path in (tmp_path / "disk").glob("*/model.*.pt"))
        found = newest_step(tmp_path)
        assert found == on_disk > step
        step = found


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def move_to_disk(folder: Path, step: int) -> None:
    checkpoints, local = places(folder)
    local.write(checkpoints.new(1, step), Letters(step))


def test_what_an_earlier_training_left_on_the_disk_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, local = places(tmp_path)
    save(tmp_path, 1)
    move_to_disk(tmp_path, 9)
    note = checkpoints.note.read_text()
    checkpoints.write(checkpoints.new(1, 2), Letters(2))  # by a start without the key, from step 1
    copy_newest(SingleCommunicator(), checkpoints, local)
    assert checkpoints.newest() == checkpoints.checkpoint_at(1, 2)
    assert caplog.text == ""
    checkpoints.note.write_text(note.replace('"id": "', '"id": "0'))  # the newest one is on another host
    copy_newest(SingleCommunicator(), checkpoints, local)
    assert checkpoints.newest() == checkpoints.checkpoint_at(1, 2)
    assert f"{checkpoints.note}: expected the checkpoint in epoch 1, after step 9 of all from {tmp_path / 'disk'}" in caplog.text
    assert (
        "got none here: training continues in epoch 1, after step 2 of all (to continue from that one, start rank 0"
        in caplog.text
    )
    checkpoints.note.write_text("{")
    caplog.clear()
    copy_newest(SingleCommunicator(), checkpoints, local)
    assert caplog.text == ""


def test_a_copy_that_fails_ends_training_and_the_next_start_copies_again(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"corpus": corpus, "part": "two.hdf", "max_seqs": 1, "num_epochs": 2, "checkpoint_local": tmp_path / "disk"}

    def run(folder: str) -> None:
        given = {**keys, "model": tmp_path / folder / "model"}
        train(read_settings([TOY], {name: str(value) for name, value in given.items()}))

    run("whole")
    in_the_way = tmp_path / "exp" / "model.002.opt.pt"
    in_the_way.mkdir(parents=True)
    (in_the_way / "file").touch()
    with pytest.raises(CheckpointError, match=r"^checkpoint_local: .*exp/model.002.pt: expected to write a checkpoint, got: "):
        run("exp")
    assert CheckpointFolder(tmp_path / "exp" / "model").finished_epochs() == [1]
    (in_the_way / "file").unlink()
    in_the_way.rmdir()
    capsys.readouterr()
    run("exp")
    told = capsys.readouterr().out
    assert f"Copied {tmp_path / 'exp' / 'model.002.pt'} and its other files from {tmp_path / 'disk'}" in told
    assert "Already trained until final epoch 2" in told
    assert_same(saved_model(tmp_path / "exp" / "model", 2), saved_model(tmp_path / "whole" / "model", 2))


def test_a_model_in_several_files_is_copied_whole(tmp_path: Path) -> None:
    class Parts(Letters):
        def write(self, model_file: Path, optimizer_file: Path) -> None:
            super().write(model_file, optimizer_file)
            for suffix in ("meta", "progress", "data-00000-of-00001"):
                model_file.with_name(f"model.001.{suffix}").write_text(suffix)

    def folder_at(prefix: Path) -> CheckpointFolder:
        return CheckpointFolder(prefix, "npz", "index", (r"data-\d{5}-of-\d{5}", "meta", "progress"), "progress")

    checkpoints, disk = (folder_at(tmp_path / name / "model") for name in ("exp", "disk"))
    local = LocalDisk(disk, checkpoints, is_awaited=True)
    target = checkpoints.new(1)
    local.copy(target, local.write(target, Parts(1, 10)), set())
    names = {"index", "opt.npz", "running.npz", "meta", "progress", "data-00000-of-00001"}
    assert {path.name for path in checkpoints.folder.iterdir()} == {f"model.001.{name}" for name in names}
    assert (checkpoints.folder / "model.001.meta").read_text() == "meta"


def test_two_trainings_of_the_same_name_have_folders_of_their_own() -> None:
    one, other = (local_prefix("/disk", Path(f"/exp/{name}/model")) for name in "ab")
    assert one != other
    assert (one.name, one.parent.name[-2:]) == ("model", "-a")
