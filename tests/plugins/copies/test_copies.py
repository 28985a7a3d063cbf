"""Copies of files on a local disk: by several processes at once, killed ones among them, within a budget."""

import contextlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainings import Run, Trained, trains

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.opening import OpeningContext, open_dataset
from hvdtrain.errors import DataError
from hvdtrain.plugins.copies.folder import CopyFolder, NotCopied, copy_files, try_lock

SIZE = 1 << 20
FORK = multiprocessing.get_context("fork")


def nothing(_: int) -> None:
    pass


@pytest.fixture
def originals(tmp_path: Path) -> list[Path]:
    """Four files of 1 MiB."""
    folder = tmp_path / "far"
    folder.mkdir()
    paths = [folder / f"{number}.hdf" for number in range(4)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * SIZE)
    return paths


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near" / "cache"


@contextlib.contextmanager
def opened(near: Path, budget: int | None = None) -> Iterator[CopyFolder]:
    folder = CopyFolder(near, budget)
    folder.open()
    yield folder
    folder.close()


@contextlib.contextmanager
def child(work: Callable[[Any], None]) -> Iterator[tuple[Any, Any]]:
    """A process that does something, and a pipe to it. It is killed in the end."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=work, args=(there,))
    process.start()
    there.close()
    yield process, here
    process.kill()
    process.join()


def test_a_file_is_copied_once_and_anew_when_it_changed(originals: list[Path], near: Path) -> None:
    with opened(near) as folder:
        first = folder.copy(originals[1], nothing)
        assert (first.is_new, first.size, first.path.read_bytes()) == (True, SIZE, originals[1].read_bytes())
        assert first.path.name.endswith("-1.hdf")
        with opened(near) as other:
            assert other.copy(originals[1], nothing).path == first.path
        originals[1].write_bytes(b"new" * (SIZE // 3) + b"!")  # as many bytes as before
        second = folder.copy(originals[1], nothing)
        assert (second.is_new, second.path.read_bytes()[:3], first.path.read_bytes()[:3]) == (True, b"new", b"\1\1\1")
    assert sorted(path.name for path in near.iterdir()) == sorted([".lock", first.path.name, second.path.name])


def test_several_processes_copy_each_file_once(originals: list[Path], near: Path) -> None:
    def work(pipe: Any) -> None:
        pipe.recv()
        pipe.send(copy_files(CopyFolder(near, None), map(str, originals), nothing))
        pipe.recv()

    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(child(work))[1] for _ in range(4)]
        for pipe in pipes:
            pipe.send("go")
        results = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send("end")
    assert sum(result.num_new for result in results) == 4
    assert sum(result.new_size for result in results) == 4 * SIZE
    assert {len(result.places) for result in results} == {4}
    for path in originals:
        assert {Path(result.places[str(path)]).read_bytes() == path.read_bytes() for result in results} == {True}


def slowly(near: Path, original: Path, budget: int | None = None) -> Callable[[Any], None]:
    """Copies a file, but stops after the first block until it may continue."""

    def work(pipe: Any) -> None:
        def wait(_: int) -> None:
            pipe.send("begun")
            pipe.recv()

        with opened(near, budget) as folder:
            folder.copy(original, wait)
            pipe.send("done")
            pipe.recv()

    return work


def test_who_waits_for_another_process_gets_its_copy(originals: list[Path], near: Path) -> None:
    with child(slowly(near, originals[0])) as (_, pipe), opened(near) as folder:
        assert pipe.recv() == "begun"
        assert [path.name.endswith("-0.hdf") for path in near.glob("partial-*")] == [True]
        reports: list[int] = []

        def waiting(number: int) -> None:
            reports.append(number)
            if len(reports) == 3:
                pipe.send("continue")

        copy = folder.copy(originals[0], waiting)
        assert (copy.is_new, copy.path.read_bytes() == originals[0].read_bytes()) == (False, True)
        assert len(reports) >= 3
        assert reports[-1] > 0  # what the other one has written: a sign of life


def test_who_waits_for_a_process_that_is_killed_takes_over(originals: list[Path], near: Path) -> None:
    with child(slowly(near, originals[0])) as (process, pipe), opened(near) as folder:
        assert pipe.recv() == "begun"

        def waiting(_: int) -> None:
            if process.is_alive():
                process.kill()
                process.join()

        copy = folder.copy(originals[0], waiting)
        assert (copy.is_new, copy.path.read_bytes() == originals[0].read_bytes()) == (True, True)
        assert len(list(near.glob("partial-*"))) == 0


def test_files_vanish_only_under_the_lock_of_the_folder(
    originals: list[Path], near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        begun.set()
        go_on.wait(10)
        raise ValueError("stopped")

    def copy() -> None:
        with opened(near) as other, contextlib.suppress(ValueError):
            other.copy(originals[0], fail)

    begun, go_on, other = threading.Event(), threading.Event(), threading.Thread(target=copy)
    other.start()
    begun.wait(10)

    def meanwhile(file: int) -> bool:
        if (near / ".lock").stat().st_ino != os.fstat(file).st_ino and not go_on.is_set():
            go_on.set()
            other.join(0.3)  # it has to wait
        return try_lock(file)

    monkeypatch.setattr("hvdtrain.plugins.copies.folder.try_lock", meanwhile)
    with opened(near) as folder:
        assert folder.copy(originals[0], nothing).path.read_bytes() == originals[0].read_bytes()
    other.join()


def test_what_a_killed_process_left_counts_no_longer(originals: list[Path], near: Path) -> None:
    with child(slowly(near, originals[0])) as (process, pipe):
        assert pipe.recv() == "begun"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert len(list(near.glob("partial-*"))) == len(list(near.glob("process-*"))) == 1
    with opened(near, budget=SIZE + 100) as folder:
        assert folder.copy(originals[1], nothing).is_new
        assert len(list(near.glob("partial-*"))) == 0
        assert len(list(near.glob("process-*"))) == 1  # its own


def test_the_longest_unused_copies_make_room_but_none_that_is_in_use(originals: list[Path], near: Path) -> None:
    with opened(near) as folder:
        paths = [folder.copy(path, nothing).path for path in originals[:3]]
        for age, path in enumerate(paths):
            os.utime(path, ns=(time.time_ns() - (10 - age) * 10**9, path.stat().st_mtime_ns))
    (near / "mine.txt").write_text("not a copy")
    budget = 3 * SIZE + 10

    def use_first(pipe: Any) -> None:
        with opened(near, budget) as folder:
            pipe.send(folder.copy(originals[0], nothing).is_new)
            pipe.recv()

    with child(use_first) as (_, pipe):
        assert pipe.recv() is False
        with opened(near, budget) as folder:
            assert folder.copy(originals[3], nothing).is_new
            assert [path.exists() for path in paths] == [True, False, True]  # the second: the longest unused
            assert folder.copy(originals[2], nothing).path == paths[2]
            with pytest.raises(
                NotCopied, match=r"no room for 1.0 MB in .*cache \(cache_dir\): 3.0 MB of 3.0 MB \(cache_dir_size\)"
            ):
                folder.copy(originals[1], nothing)
    with opened(near, budget) as folder:  # no process uses any of them now
        assert folder.copy(originals[1], nothing).is_new
    assert (near / "mine.txt").exists()
    assert sum(path.stat().st_size for path in near.glob("*.hdf")) == 3 * SIZE


def test_room_is_promised_to_who_copies_now(originals: list[Path], near: Path) -> None:
    with child(slowly(near, originals[0], 2 * SIZE)) as (_, pipe), opened(near, 2 * SIZE) as folder:
        assert pipe.recv() == "begun"
        assert folder.copy(originals[1], nothing).is_new
        with pytest.raises(NotCopied, match="no room"):
            folder.copy(originals[2], nothing)
        pipe.send("continue")
        assert pipe.recv() == "done"


def test_a_file_larger_than_the_disk_is_read_where_it_is(originals: list[Path], near: Path) -> None:
    with originals[1].open("r+b") as file:
        file.truncate(8 << 40)
    found = copy_files(CopyFolder(near, None), map(str, originals), nothing)
    assert list(found.places) == [str(path) for path in originals if path != originals[1]]
    assert list(found.not_copied) == [str(originals[1])]
    assert found.not_copied[str(originals[1])].startswith(f"no room for 8192.0 GB in {near} (cache_dir): the disk has ")


def test_a_disk_that_is_full_sooner_than_it_said(originals: list[Path], near: Path) -> None:
    def work(pipe: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))
        pipe.send(copy_files(CopyFolder(near, None), [str(originals[0])], nothing).not_copied)

    with child(work) as (_, pipe):
        assert pipe.recv() == {str(originals[0]): f"cannot write to {near} (cache_dir): File too large"}
    assert list(near.glob("*.hdf")) == []


def test_a_folder_that_cannot_be_made(originals: list[Path]) -> None:
    found = copy_files(CopyFolder(originals[0] / "cache", None), [str(originals[0])], nothing)
    assert found.places == {}
    assert found.not_copied == {"all files": f"cannot write to {originals[0] / 'cache'} (cache_dir): Not a directory"}


def test_an_original_that_is_not_there(near: Path, tmp_path: Path) -> None:
    with opened(near) as folder:
        with pytest.raises(DataError, match=r"none.hdf: expected a file, got: No such file or directory"):
            folder.copy(tmp_path / "none.hdf", nothing)
        with pytest.raises(DataError, match=r"expected a file, got a directory or the like"):
            folder.copy(tmp_path, nothing)


@pytest.mark.parametrize("how", ["longer", "shorter", "touched", "replaced"])
def test_an_original_that_changes_while_it_is_copied(originals: list[Path], near: Path, how: str) -> None:
    path = originals[0]
    path.write_bytes(bytes(20 * SIZE))

    def change(done: int) -> None:
        if how == "replaced":
            (path.parent / "new").write_bytes(bytes(20 * SIZE))
            (path.parent / "new").rename(path)
        elif how == "touched":
            os.utime(path)
        else:
            os.truncate(path, 21 * SIZE if how == "longer" else 9 * SIZE)

    with opened(near) as folder, pytest.raises(DataError, match="does not change while it is copied, got one that was changed"):
        folder.copy(path, change)
    assert list(near.glob("*.hdf")) == []


def test_a_bad_file_is_reported_with_the_name_the_config_has(tmp_path: Path, near: Path) -> None:
    bad = tmp_path / "bad.hdf"
    bad.write_text("not HDF")
    spec, _ = parse("train", {"class": "MetaDataset", "datasets": {"a": str(bad)}, "data_map": {"data": ("a", "data")}}, {})
    assert spec is not None
    found = copy_files(CopyFolder(near, None), [path for part in spec.all() for path in part.copied], nothing)
    with pytest.raises(DataError, match=rf"{near}/.*-bad.hdf: expected an HDF5 file, got .* \(a copy of {bad}\)$"):
        open_dataset(spec, OpeningContext(copies=found.places))


def test_a_folder_that_was_closed_while_a_thread_copies(originals: list[Path], near: Path) -> None:
    with opened(near) as folder, pytest.raises(NotCopied, match="the folder was closed"):
        folder.copy(originals[0], lambda _: folder.close())
    assert list(near.glob("*.hdf")) == []


# ------------------------------------------------------------------------------------------------ under mpirun

RUN = Run("torch", "horovod", 2)


@trains(RUN)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """The second one on files of the same contents elsewhere, with room for one of them once the first one's copies have gone."""
    corpus, far = folder.parents[2] / "corpus", folder / "far"
    far.mkdir(exist_ok=True)
    for name in ("train.hdf", "dev.hdf"):
        shutil.copy2(corpus / name, far)
    common = {"evaluated": True, "cache_dir": folder / "near"}
    return {"first": common, "second": {**common, "corpus": far, "cache_dir_size": (corpus / "train.hdf").stat().st_size + 10}}


def test_ranks_train_on_copies_that_one_of_them_made(trained: Trained, corpus: Path) -> None:
    results = trained(trainings, RUN)
    first, second = results.out("first"), results.out("second")
    assert re.search(r": 2 files \(\d+.\d KB\) are read from copies in .*/near, 2 copied now \(\d+.\d KB in ", first), first
    assert second.count("not copied, read from its original path: ") == 1
    assert results.scores("first") == results.scores("second") != []
    near = results.folder / "near"
    [left] = near.glob("*.hdf")
    assert left.read_bytes() in [(corpus / name).read_bytes() for name in ("train.hdf", "dev.hdf")]
    assert list(near.glob("process-*")) == []  # they took leave
