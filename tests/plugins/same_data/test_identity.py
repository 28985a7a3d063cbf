"""What identifies the data: other values, lengths and tags are named; how sequences are stored does not count."""

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy
import pytest
from hdf_files import Change, laid_out, put
from opened_data import opened

from hvdtrain.data.dataset import DatasetPart
from hvdtrain.errors import BrokenSequence
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.plugins.same_data.identity import _is_close, _numbers, changes, identify, rewritten_files

NUMBER = 3000


def write(path: Path, tags: range = range(NUMBER)) -> Path:
    """Sequences of 1 to 3 frames, the same for a number in any file."""
    with HDFWriter(path, dims={"classes": 5}) as writer:
        for number in tags:
            frames = numpy.full((1 + number % 3, 2), number, numpy.float32)
            writer.add(f"sequence {number}", {"data": frames, "classes": numpy.array([number % 5], numpy.int32)})
    return path


def parts_of(value: dict[str, object]) -> list[DatasetPart]:
    """What a dataset consists of."""
    found: list[DatasetPart] = []
    opened(value, parts=found)
    return found


def parts(*paths: Path | str, **more: object) -> list[DatasetPart]:
    return parts_of({"class": "HDFDataset", "files": [str(path) for path in paths], **more})


def found(before: list[DatasetPart], now: list[DatasetPart]) -> list[str]:
    return list(changes(identify(before), now))


def changed(path: Path, change: Change) -> Path:
    with h5py.File(path, "r+") as file:
        change(file)
    return path


@pytest.fixture
def one(tmp_path: Path) -> list[DatasetPart]:
    return parts(write(tmp_path / "one.hdf"))


def test_the_same_sequences_stored_otherwise(one: list[DatasetPart], tmp_path: Path) -> None:
    assert found(one, one) == []
    shutil.copyfile(tmp_path / "one.hdf", tmp_path / "copy.hdf")
    assert found(one, parts(tmp_path / "copy.hdf")) == []
    two = [write(tmp_path / "first.hdf", range(1000)), write(tmp_path / "rest.hdf", range(1000, NUMBER))]
    assert found(one, parts(*two)) == []
    assert found(parts(*two), one) == []
    assert found(parts(*two), parts(*two, **{"class": "FilesDataset", "max_open_files": 1})) == []
    changed(tmp_path / "copy.hdf", laid_out("inputs", chunks=(100, 2), compression="gzip"))
    changed(tmp_path / "copy.hdf", laid_out("seqLengths", dtype=">i8"))
    changed(tmp_path / "copy.hdf", laid_out("seqTags", dtype=h5py.string_dtype()))
    assert found(one, parts(tmp_path / "copy.hdf")) == []
    changed(tmp_path / "copy.hdf", laid_out("targets/data/classes", dtype=">i4"))
    assert found(one, parts(tmp_path / "copy.hdf")) == []


def test_a_file_that_is_written_again_is_the_same_data(one: list[DatasetPart], tmp_path: Path) -> None:
    before = identify(one)
    assert rewritten_files(before, one) == []
    os.utime(tmp_path / "one.hdf", ns=(0, 0))
    again = parts(tmp_path / "one.hdf")
    assert (list(changes(before, again)), rewritten_files(before, again)) == ([], [str(tmp_path / "one.hdf")])
    del before[0]["samples"]  # as in earlier releases
    for number, expected in enumerate(([], [f"other values in sequence 'sequence 0' of {tmp_path}/one.hdf"])):
        before[0]["values"] = [[0, zlib.crc32(2 * numpy.int32(number).tobytes() + bytes(16))]]
        assert [line.partition(", modified")[0] for line in changes(before, again)] == expected


def values_of(numbers: Callable[[numpy.ndarray], numpy.ndarray]) -> Change:
    return lambda file: file["inputs"].write_direct(numbers(file["inputs"][:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (values_of(lambda frames: frames + 1), "other values in sequence 'sequence 0' of {path}"),
        (
            values_of(lambda frames: numpy.where(numpy.arange(len(frames))[:, None] < 3000, frames, -1)),
            "other values in sequence",
        ),
        (lambda file: file["targets/data/classes"].write_direct(numpy.full(NUMBER, 4, numpy.int32)), "other values in sequence"),
        (
            lambda file: file["seqLengths"].write_direct(numpy.roll(file["seqLengths"][:], 1, axis=0)),
            "other lengths of 'data' in {path}",
        ),
        (lambda file: file["seqTags"].write_direct(file["seqTags"][:][::-1].copy()), "other tags in {path}"),
        (put("seqTags", numpy.array([b"%d" % number for number in range(NUMBER)])), "other tags in {path}, "),
        (put("seqTags", numpy.array([b"sequence %d" % (number % 2999) for number in range(NUMBER)])), "other tags in {path}"),
    ],
)
def test_other_data(one: list[DatasetPart], tmp_path: Path, change: Change, message: str) -> None:
    before = identify(one)
    path = changed(tmp_path / "one.hdf", change)
    os.utime(path, ns=(0, 0))
    [difference] = changes(before, parts(path))
    assert difference.startswith(message.format(path=path))
    assert ", modified 19" in difference


def test_the_file_is_named(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.hdf", range(number, number + 9)) for number in range(30)]
    before = identify(parts(*paths))
    changed(paths[17], values_of(lambda frames: frames + 1))
    [difference] = changes(before, parts(*paths))
    assert difference.startswith(f"other values in sequence 'sequence 17' of {paths[17]}, modified ")
    size = paths[5].stat().st_size
    paths[5].unlink()
    write(paths[5], range(300))
    [difference] = changes(before, parts(*paths))
    assert difference.startswith(
        f"300 sequences instead of 9 in {paths[5]}, {paths[5].stat().st_size} bytes instead of {size}, modified "
    )
    paths.pop(0)
    assert list(changes(before, parts(*paths))) == ["552 sequences instead of 270 in train"]


def test_other_datasets_and_other_keys(one: list[DatasetPart], tmp_path: Path) -> None:
    assert found([*one, *one], one) == ["1 datasets instead of 2"]
    before = identify(one)
    path = changed(tmp_path / "one.hdf", put("targets/data/classes", None))
    changed(path, lambda file: file.__delitem__("targets"))
    changed(path, lambda file: put("seqLengths", file["seqLengths"][:, :1])(file))
    [difference] = changes(before, parts(path))
    assert difference.startswith(f"no data key 'classes' in {path}")


class Own:
    """A dataset of a user's, with other values every time or now and then, or the same ones."""

    streams = {}  # noqa: RUF012

    def __init__(self, length: int = 5, tag: str = "a", value: float | None = None, doubled: float = 0.0) -> None:
        self.lengths = {"data": numpy.full(2, length, numpy.int32)}
        self.num_sequences = 2
        self.tag, self.value, self.doubled = tag, value, doubled
        self.generator = numpy.random.default_rng(1)

    def sequence(self, index: int) -> dict[str, numpy.ndarray]:
        if self.value is not None:
            factor = 2 if self.generator.random() < self.doubled else 1
            return {"data": numpy.full(self.lengths["data"][index], factor * self.value)}
        return {"data": numpy.random.default_rng().normal(size=self.lengths["data"][index])}

    def tags(self, indices: list[int]) -> list[str]:
        return [f"{self.tag}{index}" for index in indices]


def test_python_of_ones_own_is_known_by_what_is_the_same_when_read_again() -> None:
    before = parts_of({"class": Own})
    assert found(before, parts_of({"class": Own})) == []
    assert found(before, parts_of({"class": Own, "length": 6})) == ["other lengths of 'data' in train"]
    assert found(before, parts_of({"class": Own, "tag": "b"})) == ["other tags in train"]
    steady = parts_of({"class": Own, "value": 1.0})
    assert found(steady, parts_of({"class": Own, "value": 1.0})) == []
    assert found(steady, parts_of({"class": Own, "value": 1.0 + 1e-7})) == []  # as on another processor
    drawn = numpy.random.get_state()[2]
    assert found(steady, parts_of({"class": Own, "value": 2.0}))[0] == "other values in sequence 'a0' of train"
    assert numpy.random.get_state()[2] == drawn
    for _ in range(20):  # the few that a start reads may all be the same by chance
        assert found(steady, parts_of({"class": Own, "value": 1.0, "doubled": 0.5})) == []
    with_gaps = parts_of({"class": Own, "value": numpy.nan})
    assert identify(with_gaps)[0]["samples"]["data"]
    assert found(with_gaps, parts_of({"class": Own, "value": 1.0})) != []


class Broken:
    """Items with names, one of which cannot be read."""

    lengths = (1, 2, 3)

    def __init__(self, broken: int | None = 1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, object]:
        if index == self.broken:
            raise BrokenSequence("no file")
        return {"seq_tag": f"item {index}", "data": numpy.ones(index + 1, numpy.float32)}


def test_the_names_of_broken_items_do_not_count() -> None:
    before, whole = parts_of({"class": Broken}), parts_of({"class": Broken, "broken": None})
    assert found(before, before) == found(before, whole) == found(whole, before) == []


def test_datasets_inside_others_are_compared_by_name(tmp_path: Path) -> None:
    """Neither a function over sequences nor the order of the dict counts."""
    paths = {name: str(write(tmp_path / f"{name}.hdf", range(start, 20))) for start, name in enumerate("ab")}

    def joined(names: str) -> list[DatasetPart]:
        value = {
            "class": "MetaDataset",
            "datasets": {name: {"class": "HDFDataset", "files": paths[name]} for name in names},
            "data_map": {"data": ("a", "data"), "classes": ("b", "classes")},
            "seq_order_control_dataset": "b",
        }
        return parts_of({"class": "MapDataset", "dataset": value, "map_seq": lambda arrays: arrays})

    before = joined("ab")
    assert [part.name for part in before] == ["train.dataset.datasets.a", "train.dataset.datasets.b"]
    assert found(before, joined("ba")) == []
    paths["b"] = str(write(tmp_path / "c.hdf", range(2, 20)))
    [difference] = found(before, joined("ba"))
    assert difference == f"18 sequences instead of 19 in {paths['b']}"


def test_frames_that_add_up_to_one_are_told_apart_and_rounding_is_not() -> None:
    values = numpy.random.default_rng(1).normal(size=(2, 300, 80)).astype(numpy.float32)
    soft = numpy.exp(values) / numpy.exp(values).sum(axis=-1, keepdims=True)
    hot = numpy.eye(80, dtype=numpy.float32)[values.argmax(axis=-1)]
    for one, other in (soft, hot, (values[0], -values[0])):
        assert not _is_close(_numbers(one), _numbers(other))
        assert _is_close(_numbers(one), _numbers(one * numpy.float32(1 + 1e-5)))
        assert _is_close(_numbers(one), _numbers(one.astype(numpy.float16).astype(numpy.float32)))
