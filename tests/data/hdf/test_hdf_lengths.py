"""/seqLengths is read in blocks."""

import h5py
import numpy
import pytest

from hvdtrain.data.hdf import layouts as hdf_layout
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import DataError
from hvdtrain.plugins.hdf_tools.writer import HDFWriter


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf_layout, "ROWS_AT_ONCE", 3)
    with HDFWriter(tmp_path / "a.hdf") as writer:
        for number in range(10):
            writer.add(f"{number}", {"data": numpy.full((number, 2), number), "classes": numpy.full(10 - number, number)})
    return tmp_path / "a.hdf"


def test_lengths_from_several_blocks(path):
    dataset = open_hdf([path])
    assert dataset.lengths["data"].tolist() == list(range(10))
    assert dataset.lengths["classes"].tolist() == list(range(10, 0, -1))
    assert dataset.lengths["data"].dtype == numpy.int32
    for number in range(10):
        sequence = dataset.sequence(number)
        assert sequence["data"].tolist() == [[number, number]] * number
        assert sequence["classes"].tolist() == [number] * (10 - number)


@pytest.mark.parametrize(("value", "said"), [(-1, "lengths of 0 or more in /seqLengths, got -1"), (2**31, "below 2\\*\\*31")])
def test_a_wrong_length_in_a_later_block(path, value, said):
    with h5py.File(path, "r+") as file:
        lengths = file["seqLengths"][:].astype(numpy.int64)
        del file["seqLengths"]
        lengths[7, 1] = value
        file["seqLengths"] = lengths
    with pytest.raises(DataError, match=said):
        open_hdf([path])


def test_one_column_for_all_keys(path):
    with h5py.File(path, "r+") as file:
        del file["seqLengths"], file["inputs"], file["targets/data/classes"]
        file["seqLengths"] = numpy.arange(10)
        file["inputs"] = numpy.arange(90.0).reshape(45, 2)
        file["targets/data/classes"] = numpy.arange(45)
    dataset = open_hdf([path])
    assert dataset.lengths["data"].tolist() == dataset.lengths["classes"].tolist() == list(range(10))
    assert dataset.sequence(9)["classes"].tolist() == list(range(36, 45))
