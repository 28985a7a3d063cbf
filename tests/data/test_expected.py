"""What batches are compared with before the model sees them."""

import re
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy
import pytest
from hdf_files import write
from launching import Finished, faults, hvdtrain

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.expected import BatchCheck, check_lengths, check_streams, expected_of
from hvdtrain.data.types import Array, Batch, Padded, Stream
from hvdtrain.errors import DataError

CONFIG = """
import hvdtrain, torch

train, max_seqs, num_epochs, num_threads, learning_rate = "FILE", 2, 1, 1, 0.1
extern_data = {"data": {"dim": 2}, "classes": {"dim": 4, "sparse": True}}
LINES

def get_model(**_):
    return torch.nn.Linear(2, 4)

def train_step(*, model, extern_data, **_):
    data, classes = extern_data["data"], extern_data["classes"]
    scores = model(data.raw_tensor).mean(1)
    losses = torch.nn.functional.cross_entropy(scores, classes.raw_tensor[:, 0].long(), reduction="none")
    hvdtrain.get_run_ctx().mark_as_loss(losses, "ce")
"""


def run(folder: Path, lines: str = "", **overrides: object) -> Finished:
    (folder / "config.py").write_text(CONFIG.replace("LINES", lines).replace("FILE", str(folder / "file.hdf")))
    return hvdtrain(folder / "config.py", {"model": folder / "model", **overrides})


def replaced(name: str, values: object) -> object:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = values

    return change


WRONG: dict[str, tuple[object, str, str]] = {
    "a class beyond the file's own": (
        replaced("targets/data/classes", numpy.array([3, 1, 7, 2], "int32")),
        "",
        r"sequence 'second', data key 'classes': expected classes from 0 to 3, as extern_data.classes says, got 7 in frame 1",
    ),
    "the same without extern_data": (
        replaced("targets/data/classes", numpy.array([3, 1, 7, 2], "int32")),
        "extern_data = None",
        r"sequence 'second', data key 'classes': expected classes from 0 to 3, as the file says, got 7 in frame 1",
    ),
    "a class below 0": (
        replaced("targets/data/classes", numpy.array([3, -5, 0, 2], "int32")),
        "",
        r"sequence 'second', data key 'classes': expected classes from 0 to 3, as extern_data.classes says, got -5 in frame 0",
    ),
    "floats in place of classes": (
        replaced("targets/data/classes", numpy.array([3, 1, 0, 2], "float32")),
        "",
        r": expected class indices, got float32 in 'classes' \(according to extern_data.classes\)",
    ),
    "vectors in place of classes": (
        replaced("targets/data/classes", numpy.array([[3], [1], [0], [2]], "int32")),
        "",
        r": expected frames of shape \(\), got \(1,\) in 'classes'",
    ),
    "other features": (
        replaced("inputs", numpy.ones((5, 3), "float32")),
        "",
        r": expected frames of shape \(2,\), got \(3,\) in 'data'",
    ),
    "another precision": (
        replaced("inputs", numpy.ones((5, 2), "float64")),
        "extern_data['data']['dtype'] = 'float32'",
        r": expected float32, got float64 in 'data'",
    ),
    "integers in place of features": (
        replaced("inputs", numpy.ones((5, 2), "int16")),
        "extern_data['data']['dtype'] = 'float32'",
        r": expected float32, got int16 in 'data'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_data_that_is_not_what_the_config_says_names_file_key_and_sequence(what: str, tmp_path: Path) -> None:
    change, lines, message = WRONG[what]
    write(tmp_path / "file.hdf", change)  # type: ignore[arg-type]
    finished = run(tmp_path, lines)
    assert finished.status == 2, finished.out + finished.err
    assert re.search(re.escape(f"train ({tmp_path / 'file.hdf'})") + ".*" + message, finished.err), finished.err


def test_data_that_is_what_the_config_says(tmp_path: Path) -> None:
    write(tmp_path / "file.hdf")
    finished = run(tmp_path, "extern_data['data']['dtype'] = 'float32'; extern_data['other'] = {'dim': 7}")
    assert finished.status == 0, finished.err


def test_marks_of_frames_without_a_class_are_none(tmp_path: Path) -> None:
    write(tmp_path / "file.hdf", replaced("targets/data/classes", numpy.array([3, 2, 0, -100], "int32")))  # type: ignore[arg-type]
    assert run(tmp_path).status == 0


def test_what_extern_data_may_be() -> None:
    class Dim:
        def __init__(self, dimension: int | None) -> None:
            self.dimension = dimension

    given = {
        "plain": {"dim": 9},
        "classes": {"dim": 5, "sparse": True, "dtype": "int32"},
        "image": {"shape": (None, 3, 4), "dtype": "uint8"},
        "of dims": {"dims": [Dim(None), Dim(None), Dim(7)]},
        "number": {"shape": (), "dtype": "int32"},
        "one class": {"dim": 5, "sparse": True, "time_dim_axis": None},
        "of RETURNN": {"dim": Dim(4), "time_dim_axis": 1, "vocab": {}, "available_for_inference": True},
        "seq_tag": {"dtype": "string"},
    }
    found, problems = expected_of(given)
    assert problems == []
    assert {name: (one.shape, one.dim) for name, one in found.items()} == {
        "plain": ((9,), None),
        "classes": ((), 5),
        "image": ((3, 4), None),
        "of dims": ((7,), None),
        "number": (None, None),
        "one class": (None, 5),
        "of RETURNN": ((4,), None),
    }
    assert faults(expected_of({"a": {"dim": -1}, "b": {"dtype": "floaty"}})[1]) == [
        "extern_data.a: wrong-type",
        "extern_data.b: wrong-type",
    ]


class Corpus(Dataset):
    """Two sequences of 3 and 2 frames, and whatever else is set."""

    def __init__(self, **changed: object) -> None:
        self.streams = {"data": Stream(numpy.dtype("float32"), (2,), 2, False)}
        self.lengths: Mapping[str, Array] = {"data": numpy.array([3, 2], "int32")}
        self.arrays = [numpy.ones((3, 2), "float32"), numpy.ones((2, 2), "float32")]
        vars(self).update(changed)

    @property
    def num_sequences(self) -> int:
        return 2

    def sequence(self, index: int) -> dict[str, Array]:
        return {"data": self.arrays[index]}

    def tags(self, indices: object) -> list[str]:
        return [("a", "b")[index] for index in indices]  # type: ignore[attr-defined]


def ones(*shape: int, dtype: str = "float32") -> Array:
    return numpy.ones(shape, dtype)


READ: dict[str, tuple[list[Array], str]] = {
    "too short": ([ones(3, 2), ones(1, 2)], r"sequence 'b', data key 'data': expected 2 frames, as .* planned with, got 1"),
    "too long": ([ones(4, 2), ones(2, 2)], r"sequence 'a', data key 'data': expected 3 frames, as .* planned with, got 4"),
    "repeated by numpy": (
        [ones(3, 2), ones(2, 1)],
        r"sequence 'b', data key 'data': expected float32 of shape \(2,\).*got float32 of shape \(1,\)",
    ),
    "all of another shape": ([ones(3, 3), ones(2, 3)], r"expected frames of shape \(2,\), got frames of shape \(3,\)"),
    "rounded by numpy": ([ones(3, 2, dtype="int32"), ones(2, 2)], r"sequence 'b', data key 'data': expected int32.*got float32"),
    "complex": ([ones(3, 2, dtype="complex64"), ones(2, 2, dtype="complex64")], r"expected float32, got complex64"),
}


@pytest.mark.parametrize("what", READ)
def test_sequences_that_a_users_dataset_makes_otherwise_than_it_says(what: str) -> None:
    arrays, message = READ[what]
    dataset = Corpus(arrays=arrays)
    check = BatchCheck("train", dataset, dataset.lengths)
    indices = numpy.arange(2)
    with pytest.raises(DataError, match=message):
        check(dataset.batch(indices), indices)


def test_a_batch_of_fewer_sequences_than_planned() -> None:
    dataset = Corpus()
    check = BatchCheck("train", dataset, dataset.lengths)
    batch = Batch({"data": Padded(ones(1, 3, 2), numpy.array([3]))}, numpy.arange(2))
    with pytest.raises(DataError, match=r"expected 2 sequences in a batch, got 1"):
        check(batch, numpy.arange(2))


LENGTHS: dict[str, tuple[object, str]] = {
    "NaN": (numpy.array([3, numpy.nan]), "an array of 2 integers, got float64"),
    "too few": (numpy.array([3]), r"an array of 2 integers, got int64 of shape \(1,\)"),
    "negative": (numpy.array([3, -2]), r"lengths of 'data' of 0 or more, got -2 for sequence 1"),
    "a list": ([3, 2], "an array of 2 integers, got list"),
}


@pytest.mark.parametrize("what", LENGTHS)
def test_lengths_of_a_users_dataset_that_are_none(what: str) -> None:
    lengths, message = LENGTHS[what]
    with pytest.raises(DataError, match=message):
        check_lengths("train", Corpus(lengths={"data": lengths}))


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble", "S3", "datetime64[s]", "V4"])
def test_types_that_tensors_do_not_have(dtype: str) -> None:
    streams = {"data": Stream(numpy.dtype(dtype), (), 1, False)}
    with pytest.raises(DataError, match=r"^train \(a.hdf\): expected numbers of a type that tensors have.*, got .* in 'data'"):
        check_streams("train", streams, ["a.hdf"], {})
