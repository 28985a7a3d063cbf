"""HDF files with a dataset for every sequence."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy
import pytest
from hdf_files import put
from opened_data import opened, problems_of

from hvdtrain.data.dataset import Dataset
from hvdtrain.errors import DataError

NAMES = ["corpus/é/1", "corpus/2"]


def write(path: Path, change: Callable[[h5py.File], None] | None = None) -> Path:
    """Two sequences in three streams, one of every kind."""
    with h5py.File(path, "w") as file:
        file["seq_names"] = NAMES
        for name, parser in (("features", "feature_sequence"), ("words", "sparse"), ("states", "segment_alignment")):
            stream = file.create_group(f"streams/{name}")
            stream.attrs["parser"] = parser
            stream.create_group("data")
            if parser != "feature_sequence":
                stream["feature_names"] = ["a", "b", "c"]
        for number, name in enumerate(NAMES):
            stored = name.replace("/", "\\")
            file["streams/features/data"][stored] = numpy.full((number + 3, 4), number, numpy.float32)
            file["streams/words/data"][stored] = numpy.array([2, 0][: number + 1], numpy.int32)
            file["streams/states/data"][stored] = numpy.array([[number, 2], [2, number + 1]], numpy.int32)
        if change is not None:
            change(file)
    return path


def opened_files(*paths: Path, name: str = "features") -> Dataset:
    return opened({"class": "NextGenHDFDataset", "files": [str(path) for path in paths], "input_stream_name": name})


def test_every_kind_of_stream(tmp_path: Path) -> None:
    dataset = opened_files(write(tmp_path / "a.hdf"))
    assert dataset.tags([1, 0]) == NAMES[::-1]
    assert {key: column.tolist() for key, column in dataset.lengths.items()} == {
        "data": [3, 4],
        "states": [6, 8],
        "words": [1, 2],
    }
    described = {key: (stream.shape, stream.dim, stream.sparse, stream.labels) for key, stream in dataset.streams.items()}
    assert described == {
        "data": ((4,), 4, False, ()),
        "states": ((), 3, True, ("a", "b", "c")),
        "words": ((), 3, True, ("a", "b", "c")),
    }
    arrays = dataset.sequence(1)
    assert arrays["data"].tolist() == 4 * [4 * [1.0]]
    assert arrays["words"].tolist() == [2, 0]
    assert arrays["states"].reshape(-1, 2).tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]  # class, end of segment
    dataset.close()


def test_another_input_and_several_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.hdf")
    dataset = opened_files(path, path, name="words")
    assert (dataset.num_sequences, sorted(dataset.streams)) == (4, ["data", "features", "states"])
    assert dataset.sequence(2)["data"].tolist() == [2]
    assert dataset.tags([3]) == ["corpus/2"]


def test_further_streams_of_a_later_file_are_ignored(tmp_path: Path) -> None:
    def without_words(file: h5py.File) -> None:
        del file["streams/words"]

    dataset = opened_files(write(tmp_path / "a.hdf", without_words), write(tmp_path / "b.hdf"))
    assert list(dataset.sequence(3)) == list(dataset.padded(numpy.arange(40) % 4)) == ["data", "states"]


def unknown_parser(file: h5py.File) -> None:
    file["streams/words"].attrs["parser"] = "word_sequence"


SECOND = "data/corpus\\2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("seq_names", None), "expected /seq_names"),
        (put("streams", None), "expected /streams"),
        (put("streams/features", None), r"expected a stream 'features' \(input_stream_name\), got states, words"),
        (unknown_parser, "expected attribute parser of /streams/words to be one of .*, got 'word_sequence'"),
        (put(f"streams/words/{SECOND}", None), r"expected /streams/words/data/corpus\\2, got only"),
        (put(f"streams/words/{SECOND}", numpy.zeros((2, 2), int)), r"expected 1 axes \(sparse\)"),
        (put(f"streams/features/{SECOND}", numpy.zeros((2, 5), numpy.float32)), r"expected 2 axes \(feature_sequence\)"),
        (put(f"streams/states/{SECOND}", numpy.array([[1, -2]], numpy.int32)), "expected rows of .class, number of frames"),
        (put(f"streams/words/{SECOND}", h5py.ExternalLink("other.hdf", "/x")), "got a link to another file"),
        (put("streams/words/feature_names", None), "expected /streams/words/feature_names"),
        (put("seq_names", numpy.zeros(2)), "expected strings of shape"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path: Path, change: Callable[[h5py.File], None], message: str) -> None:
    path = write(tmp_path / "a.hdf", change)
    with pytest.raises(DataError, match=message) as caught:
        opened_files(path)
    assert str(caught.value).startswith(f"{path}: expected ")


def test_malformed_dicts() -> None:
    found = problems_of({"class": "NextGenHDFDataset", "files": [], "input_stream_nam": "x"})
    assert found == ["train.input_stream_name: missing", "train.input_stream_nam: unknown-key"]
