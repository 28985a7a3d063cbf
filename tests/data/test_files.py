"""Files that another process replaces, overwrites or cuts while they are read."""

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy
import pytest
from launching import TOY, Finished, hvdtrain

from hvdtrain.data.files import Unchanged
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import DataError
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

FRAMES = numpy.arange(40_000, dtype=numpy.float32).reshape(10_000, 4)


def write(path: Path, frames: numpy.ndarray, compressed: bool = False) -> Path:
    """100 sequences of 100 frames."""
    with HDFWriter(path, compression="gzip" if compressed else None) as writer:
        for number in range(100):
            writer.add(f"seq-{number}", {"data": frames[number * 100 : number * 100 + 100]})
    return path


def replace(path: Path) -> None:
    write(path.with_name("new.hdf"), FRAMES + 1).rename(path)


def overwrite(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["inputs"][...] = FRAMES + 1


def cut(path: Path) -> None:
    os.truncate(path, 10_000)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "replaced": (replace, "got another file in its place.* new file"),
    "overwritten": (overwrite, "got one that was modified at 2.* new file"),
    "cut": (cut, "got one of 10000 bytes instead of 1.* new file"),
    "touched": (lambda path: os.utime(path), "got one that was modified at 2.* new file"),
    "removed": (Path.unlink, "got: no such file"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_is_noticed(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "file.hdf", FRAMES)
    files = Unchanged([str(path), str(path), str(tmp_path / "none.hdf")])
    files.check()
    os.utime(path, ns=(1, path.stat().st_mtime_ns))  # `touch -a`, as against clean-ups of old files
    files.check()
    change, message = CHANGES[how]
    change(path)
    with pytest.raises(DataError, match=rf"file.hdf: expected the file that was opened at the start, {message}"):
        files.check()


def test_a_mapped_file_that_was_replaced_reads_as_before(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf", FRAMES)
    dataset = open_hdf([path])
    assert dataset.memory_mapped == {"data"}
    replace(path)
    sequences = [dataset.sequence(index)["data"] for index in range(100)]
    assert numpy.array_equal(numpy.concatenate(sequences), FRAMES)
    with pytest.raises(DataError, match="another file in its place"):  # they would be those of the new file
        dataset.tags([3])


def test_a_file_that_is_open_in_h5py_reads_as_before(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf", FRAMES, compressed=True)
    dataset = open_hdf([path])
    assert dataset.memory_mapped == frozenset()
    dataset.sequence(0)
    replace(path)
    assert numpy.array_equal(numpy.concatenate([dataset.sequence(index)["data"] for index in range(100)]), FRAMES)


def test_a_file_that_is_opened_again_is_the_same_one(tmp_path: Path) -> None:
    """By the first read through h5py, or by a forked process: the index is that of the file before."""
    path = write(tmp_path / "file.hdf", FRAMES, compressed=True)
    read, unread = open_hdf([path]), open_hdf([path])
    read.sequence(0)
    write(tmp_path / "new.hdf", FRAMES + 1, compressed=True).rename(path)
    with pytest.raises(DataError, match="another file in its place"):
        unread.sequence(0)
    here, there = multiprocessing.get_context("fork").Pipe()

    def work() -> None:
        try:
            there.send(read.sequence(0)["data"][0, 0])
        except DataError as error:
            there.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    assert "another file in its place" in here.recv()
    process.join()


def test_a_read_that_fails_tells_that_the_file_was_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf", FRAMES, compressed=True)
    dataset = open_hdf([path])
    dataset.sequence(0)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(
        DataError, match=r"file.hdf: expected the file that was opened at the start, got one of \d+ bytes instead of"
    ):
        dataset.sequence(99)


CONFIG = f"""
import os
# Reads the key corpus.
exec(open({str(TOY)!r}).read())
toy_step, changed = train_step, []
def train_step(*, model, extern_data, **_):
    if hvdtrain.get_run_ctx().epoch == 2 and hvdtrain.rank() == hvdtrain.size() - 1 and not changed:
        changed.append(True)
        if config.value("change") == "replace":
            os.rename(corpus / "new.hdf", corpus / "train.hdf")
        else:
            os.truncate(corpus / "train.hdf", 5000)
    toy_step(model=model, extern_data=extern_data)
"""


def train_on_a_file_that_changes_in_epoch_2(corpus: Path, folder: Path, change: str, ranks: int | None) -> Finished:
    """The last rank changes it."""
    shutil.copy(corpus / "train.hdf", folder / "train.hdf")
    shutil.copy(corpus / "train.hdf", folder / "new.hdf")
    (folder / "config.py").write_text(CONFIG)
    overrides = {"use_horovod": ranks is not None, "corpus": folder, "model": folder / "model", "num_epochs": 5, "change": change}
    return hvdtrain(folder / "config.py", overrides, ranks)


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_training_ends_before_it_saves_the_epoch_in_which_a_file_was_replaced(
    ranks: int | None, corpus: Path, tmp_path: Path
) -> None:
    finished = train_on_a_file_that_changes_in_epoch_2(corpus, tmp_path, "replace", ranks)
    assert finished.status == 2, finished.err
    assert "start epoch 2" in finished.out
    assert [path.name for path in sorted(tmp_path.glob("model.*")) if path.name.startswith("model.002")] == []
    message = f"{tmp_path}/train.hdf: expected the file that was opened at the start, got another file in its place"
    assert message in finished.err


@pytest.mark.parametrize("name", ["train.hdf", "dev.hdf"])
def test_data_that_changes_in_the_only_epoch_is_not_the_data_of_a_model(name: str, corpus: Path, tmp_path: Path) -> None:
    for each in ("train.hdf", "dev.hdf"):
        shutil.copy(corpus / each, tmp_path / each)
    (tmp_path / "config.py").write_text(f"""
import os
# Reads the keys corpus and evaluated.
exec(open({str(TOY)!r}).read())
step = train_step
def train_step(**given):
    step(**given)
    if not hvdtrain.get_run_ctx().train_flag:
        os.utime(corpus / {name!r}, (0, 0))  # after the plan of the evaluation was made
""")
    overrides = {"corpus": tmp_path, "model": tmp_path / "model", "evaluated": True, "num_epochs": 1}
    finished = hvdtrain(tmp_path / "config.py", overrides)
    assert finished.status == 2, finished.out
    assert f"{tmp_path}/{name}: expected the file that was opened at the start, got one that was modified at" in finished.err
    assert not list(tmp_path.glob("model*pt"))
    assert not (tmp_path / "scores.jsonl").exists() or not (tmp_path / "scores.jsonl").read_text()


def test_a_crash_says_that_the_data_was_changed_meanwhile(corpus: Path, tmp_path: Path) -> None:
    """For example of classes that the model does not have, after another process has written to the mapped file."""
    shutil.copy(corpus / "train.hdf", tmp_path / "train.hdf")
    (tmp_path / "config.py").write_text(f"""
import os
# Reads the key corpus.
exec(open({str(TOY)!r}).read())
def train_step(**_):
    os.utime(corpus / "train.hdf", (0, 0))
    raise IndexError("Target 153 is out of bounds.")
""")
    finished = hvdtrain(tmp_path / "config.py", {"corpus": tmp_path, "model": tmp_path / "model"})
    assert finished.status == 1
    assert "IndexError: Target 153 is out of bounds.\nin this batch: " in finished.err
    assert "\nin the meantime, the data of train was changed: " in finished.err
    assert f"{tmp_path}/train.hdf: expected the file that was opened at the start, got one that was modified at" in finished.err


@pytest.mark.slow
def test_a_mapped_file_that_is_cut_in_an_epoch_ends_the_job_and_shows_where(corpus: Path, tmp_path: Path) -> None:
    """Nothing can be done about SIGBUS, if the file is not looked at before; but everybody sees what was being read, and no rank
    hangs.
    """
    finished = train_on_a_file_that_changes_in_epoch_2(corpus, tmp_path, "cut", 2)
    assert finished.status != 0
    if "train.hdf: expected the file that was opened at the start" not in finished.err:
        assert "Fatal Python error: Bus error" in finished.err
        assert "hvdtrain/data/hdf/dataset.py" in finished.err
    assert not list(tmp_path.glob("model.002*"))
