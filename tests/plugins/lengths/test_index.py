"""What is kept about data: fingerprints that differ if it does and are the same in every process, and files of one format."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import h5py
import numpy
import pytest
from launching import ROOT

from hvdtrain.data.dataset import Scanning
from hvdtrain.disk.atomic import atomically
from hvdtrain.plugins.lengths import index
from hvdtrain.plugins.lengths.fingerprint import fingerprint_of, fingerprint_of_file
from hvdtrain.plugins.lengths.index import UNUSED, IndexFile, Stored


class Lines:
    """An iterable of files, with a member that cannot be pickled, and itself."""

    ENDS = (1,)

    def __init__(self, files: list[str], words: set[str]) -> None:
        self.files, self.words, self.lock, self.again = files, words, threading.Lock(), self

    def __iter__(self, count: int = 3) -> Iterator[str]:
        yield from (file + suffix for file in self.files for suffix in SUFFIXES)


def in_set(word: str) -> bool:
    return word in {"eins", "zwei", "drei"} and helper() > SIZE


def helper() -> int:
    return 3


SIZE = 2
SUFFIXES = [""]


def nested(function: Callable[[], int]) -> Callable[[], int]:
    return lambda: function()


@dataclass
class Locked:
    words: set[str]
    lock: Any = field(default_factory=threading.Lock)


@cache
def cached() -> int:
    return 3


class StreamOfHub:
    """What it keeps of the file systems of a hub is another in every process."""

    def __init__(self) -> None:
        self._StreamOfHub__hffs_cache = {os.getpid(): "the hub"}


StreamOfHub.__module__ = "datasets.iterable_dataset"

FOLDER = Path("a")


def in_folder() -> Path:
    return FOLDER


def values(folder: str) -> list[Any]:
    words = {"eins", "zwei", "drei"}
    lines = [Lines([name], words) for name in ("a", "b")] + [Lines(["a"], words | {"vier"})]
    functions = [in_set, helper, partial(in_set, "a"), nested(lambda: 1), nested(lambda: 2), lines[0].__iter__, lines[1].__iter__]
    generators = [numpy.random.default_rng(seed) for seed in (1, 2)]
    arrays = [numpy.arange(4), numpy.arange(4.0), numpy.arange(4).reshape(2, 2), list(range(2000)), list(range(2001))]
    plain = [{"a": 1}, {"a": 2}, {"b": 1}, "text", f"{folder}/file", re.compile("a"), re.compile("b"), range(3), {1, 2}, len]
    by_key = [{key: 1} for key in (frozenset(words), frozenset("ab"), helper, in_set, Lines, (1, frozenset(words)))]
    locked = [Locked(words), Locked({"eins"}), cached, nested(cached)]
    locked += [StreamOfHub(), fsspec.filesystem("file"), in_folder]
    return [*lines, *by_key, *locked, *functions, *generators, *arrays, *plain]


def test_fingerprints_differ_as_the_values_do_and_not_between_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("one")
    found = [fingerprint_of(value) for value in values(str(tmp_path))]
    assert len(set(found)) == len(found)
    assert fingerprint_of({"a": 1, "b": helper}) == fingerprint_of({"b": helper, "a": 1})
    code = f"import {__name__} as own\nfor value in own.values({str(tmp_path)!r}): print(own.fingerprint_of(value))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    for seed in ("1", "2"):
        run = [sys.executable, "-c", code]
        printed = subprocess.run(
            run, env=environment | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        assert printed.splitlines() == found
    (tmp_path / "file").write_text("more")
    assert fingerprint_of(str(tmp_path / "file")) not in found
    monkeypatch.setitem(globals(), "FOLDER", Path("b"))
    assert fingerprint_of(in_folder) not in found


class Restored:
    """An object whose state is set by a function."""

    def __init__(self, state: int) -> None:
        self.state = state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (), self.state, None, None, setattr


def test_what_is_no_array_of_numpy(tmp_path: Path) -> None:
    """A model's parameters of any type, datasets of files, which are not read, and objects that say how they are made."""
    import torch  # here, as other processes import this file

    values: list[Any] = [Restored(1), Restored(2)]
    for factor in (1.0, 2.0):
        parameter = torch.nn.Parameter(factor * torch.ones(3))
        values += [parameter, parameter.bfloat16(), torch.tensor(factor), parameter.detach().to_sparse()]
        with h5py.File(tmp_path / f"{factor}.hdf", "w") as file:
            file["inputs"] = numpy.full(3, factor)
        values.append(h5py.File(tmp_path / f"{factor}.hdf")["inputs"])
    found = [fingerprint_of([value]) for value in values]
    assert len(set(found)) == len(found)
    with patch.object(h5py.Dataset, "__array__", side_effect=MemoryError):
        assert [fingerprint_of([value]) for value in values] == found


def test_code_that_a_function_calls_counts_and_no_files_with_its_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    before = fingerprint_of([in_set, Lines(["a"], {"eins"})])
    for name in ("files", "helper"):  # of an attribute and a function
        (tmp_path / name).write_text("")
    (tmp_path / "eins").mkdir()
    assert fingerprint_of([in_set, Lines(["a"], {"eins"})]) == before
    (tmp_path / "a").write_text("a file that is read")
    assert fingerprint_of([in_set, Lines(["a"], {"eins"})]) != before
    found = {fingerprint_of([in_set, Lines([], set())])}
    for change in (
        partial(monkeypatch.setitem, globals(), "SIZE", 3),
        partial(monkeypatch.setitem, globals(), "SUFFIXES", ["", "."]),
        partial(monkeypatch.setattr, Lines, "ENDS", (1, 2)),
        partial(monkeypatch.setattr, Lines.__iter__, "__defaults__", (4,)),
    ):
        change()
        found.add(fingerprint_of([in_set, Lines([], set())]))
    assert len(found) == 5


@pytest.mark.parametrize(
    "table", [20_000 * ["word"], 2000 * [("id", "text")], {str(number): {"text": "word"} for number in range(2000)}]
)
def test_texts_of_a_table_are_no_names_of_files(table: Any) -> None:
    with patch("os.stat", side_effect=AssertionError):
        fingerprint_of([table])


def test_the_folder_of_a_file_counts_unless_it_is_a_copy(tmp_path: Path) -> None:
    found = {}
    for name in ("train/0.tar", "dev/0.tar", "train/0123456789abcdef-0.tar", "dev/0123456789abcdef-0.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("the same")
        os.utime(tmp_path / name, (1, 1))
        found[name] = fingerprint_of_file(str(tmp_path / name))
    assert len(set(found.values())) == 3


def test_what_is_kept_comes_back_until_it_is_damaged_or_unused(tmp_path: Path) -> None:
    arrays = {
        "tags": numpy.array([b"a", b"bcd"]),
        "none": numpy.zeros((0, 3), "f4"),
        "empty": numpy.array([b""]),
        "lengths": numpy.arange(5, dtype="i4"),
    }
    made: list[int] = []

    def make() -> Stored:
        made.append(1)
        return {"broken": [[3, "message"]]}, arrays

    file = IndexFile(tmp_path, "one")
    for mapped in (False, True, False):
        about, found = file.get("lengths", Scanning(tmp_path), make, mapped=mapped)
        assert about == {"broken": [[3, "message"]]}
        assert {name: values.tolist() for name, values in found.items()} == {
            name: values.tolist() for name, values in arrays.items()
        }
    assert len(made) == 1
    assert IndexFile(tmp_path, "other").load("lengths") is None
    path = file.path("lengths")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    assert file.load("lengths") is None
    (tmp_path / "mine.txt").write_text("another file")
    (tmp_path / f"{20 * 'a'}.corpus.npz").write_text("of an earlier version")
    for each in tmp_path.iterdir():
        os.utime(each, (0, time.time() - UNUSED - 10))
    index._remove_unused.cache_clear()
    with patch.object(Path, "iterdir", autospec=True, side_effect=Path.iterdir) as listed:
        for name in ("other", "third"):
            IndexFile(tmp_path, name).get("lengths", Scanning(tmp_path), make)
    assert listed.call_count == 1
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".index", ".index", ".lock", ".lock", ".txt"]


def test_hosts_whose_processes_have_the_same_id_write_separate_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    with atomically(path, has_peers=True) as first:
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        with atomically(path, has_peers=True) as second:
            second.write_text("second")
        first.write_text("first")
    assert path.read_text() == "first"
