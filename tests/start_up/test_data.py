"""Bad data is reported before training starts: in a message with the file, by the program as a user runs it."""

from pathlib import Path

import h5py
import numpy
import pytest
from hdf_files import put, write

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.describe import feed_lines
from hvdtrain.data.feed import Feed
from hvdtrain.errors import DataError
from hvdtrain.settings import read_settings
from hvdtrain.start_up.data import open_feeds

CONFIG = """
model = "exp/model"
learning_rate = 0.1
max_seqs = 1
def get_model(**_): ...
def train_step(**_): ...
"""


def feeds(folder: Path, more: str) -> list[Feed]:
    (folder / "config.py").write_text(CONFIG + more)
    return open_feeds(read_settings([folder / "config.py"], {}), SingleCommunicator())


def no_sequences(file: h5py.File) -> None:
    put("inputs", numpy.zeros((0, 2), numpy.float32))(file)
    put("targets/data/classes", numpy.zeros(0, numpy.int32))(file)
    put("seqLengths", numpy.zeros((0, 2), numpy.int32))(file)
    put("seqTags", numpy.zeros(0, "S1"))(file)


def test_a_file_of_no_sequences(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf", no_sequences)
    with pytest.raises(DataError) as caught:
        feeds(tmp_path, f"train = '{path}'")
    assert str(caught.value) == f"train: expected at least one sequence, got none in {path}"


def test_a_file_of_no_sequences_beside_others(tmp_path: Path) -> None:
    files = [str(write(tmp_path / "none.hdf", no_sequences)), str(write(tmp_path / "some.hdf"))]
    for kind in ("HDFDataset", "FilesDataset"):
        (feed,) = feeds(tmp_path, f"train = {{'class': '{kind}', 'files': {files + files}}}")
        assert feed.dataset.num_sequences == 4
        with feed.read(feed.rank_batches(feed.plan(1)), 1) as batches:
            assert [batch.data["data"].values[0, 0, 0] for batch in batches] == [0, 6, 0, 6]


def test_options_of_batches_are_no_limits_of_data_keys(tmp_path: Path) -> None:
    keys = "batch_cost = {'class': 'quadratic', 'at': 3}; online_shuffle_batches = {'buffer_size': 2}"
    (feed,) = feeds(tmp_path, f"train = '{write(tmp_path / 'file.hdf')}'; batch_size = {{'data': 9}}; {keys}")
    assert feed.plan(1).num_batches == 2


def test_sequences_without_frames_are_reported_and_may_be_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf", put("seqLengths", numpy.array([[0, 4], [5, 0]])))
    (feed,) = feeds(tmp_path, f"train = '{path}'")
    assert feed_lines(feed)[1:] == [
        (2, "train: 1 sequences have no frames in 'data' (the first is 'first'; min_seq_length = 1 drops them)"),
        (2, "train: 1 sequences have no frames in 'classes' (the first is 'second'; min_seq_length = 1 drops them)"),
    ]
    with feed.read(feed.rank_batches(feed.plan(1)), 1) as batches:
        shapes = [(batch.data["data"].values.shape, batch.data["classes"].values.shape) for batch in batches]
    assert shapes == [((1, 0, 2), (1, 4)), ((1, 5, 2), (1, 0))]
    (feed,) = feeds(tmp_path, f"train = '{path}'\nmin_seq_length = {{'classes': 1}}")
    assert feed.plan(1).order.tolist() == [0]


def test_an_evaluation_of_which_limits_leave_nothing_is_refused_at_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf")
    with pytest.raises(DataError, match="dev: expected one of its 2 sequences to be left at least, got none that min_seq_length"):
        feeds(tmp_path, f"train = dev = '{path}'\nmin_seq_length = 99")


def test_tags_that_stand_twice_where_they_join(tmp_path: Path) -> None:
    one = write(tmp_path / "one.hdf")
    two = write(tmp_path / "two.hdf", put("seqTags", numpy.array([b"second", b"second"])))
    both = "{{'class': 'MetaDataset', 'datasets': {{'a': '{0}', 'b': '{1}'}}, 'data_map': {{'data': ('b', 'data')}}}}"
    for first, second in ((one, two), (two, one)):
        with pytest.raises(DataError) as caught:
            feeds(tmp_path, f"train = {both.format(first, second)}")
        assert "'second'" in str(caught.value)
    (feed,) = feeds(tmp_path, f"train = '{two}'")  # nothing looks them up by tag
    assert feed.dataset.num_sequences == 2
