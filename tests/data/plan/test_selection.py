"""Leaving sequences out: by a list of tags, and by their length."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.epoch import Plan, plan
from hvdtrain.data.plan.order import order
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.data.plan.selection import find_listed, read_tags, select_by_length
from hvdtrain.errors import DataError

LENGTHS = numpy.array([5, 3, 9, 1, 7, 2, 8, 4, 6, 10, 5, 3], dtype=numpy.int32)


def batches(made: Plan) -> list[list[int]]:
    return [made.batch(index).tolist() for index in range(made.num_batches)]


def test_a_limit_on_lengths_gives_the_batches_of_returnn() -> None:
    made = plan({"data": LENGTHS}, OrderKeys(), BatchKeys(batch_size=20, max_seq_length=7), 1)
    assert batches(made) == [[0, 1, 3], [4, 5], [7, 8, 10], [11]]


def test_lengths_are_limited_in_every_key_or_by_key() -> None:
    lengths = {"data": numpy.array([1, 5, 9]), "classes": numpy.array([5, 5, 1])}
    everything = numpy.arange(3)
    assert select_by_length(lengths, everything, None, None).tolist() == [0, 1, 2]
    assert select_by_length(lengths, everything, 2, 5).tolist() == [1]
    assert select_by_length(lengths, everything, {"classes": 2}, None).tolist() == [0, 1]
    assert select_by_length(lengths, everything, None, {"data": 5, "classes": 4}).tolist() == []
    assert select_by_length(lengths, everything, 0, {"data": 0}).tolist() == [0, 1, 2]
    assert select_by_length(lengths, numpy.array([2, 1, 1, 0]), None, {"data": 5}).tolist() == [1, 1, 0]


def test_sequences_are_dropped_after_the_epoch_was_cut_into_parts() -> None:
    keys = OrderKeys(seq_ordering="random", partition_epoch=3)
    parts = [plan({"data": LENGTHS}, keys, BatchKeys(max_seqs=9, max_seq_length=5), epoch).order.tolist() for epoch in (1, 2, 3)]
    assert parts == [[3, 10], [1, 0, 7], [11, 5]]


@pytest.mark.parametrize("ordering", ["random", "laplace:.3", "sorted"])
def test_a_list_leaves_out_sequences_of_the_order_without_it(ordering: str) -> None:
    """As RETURNN does: Dataset.get_seq_order_for_epoch applies seq_tags_filter last."""
    listed, keys = numpy.array([0, 3, 4, 9]), OrderKeys(seq_ordering=ordering, partition_epoch=2)
    for epoch in (1, 2, 3):
        whole = order(LENGTHS, keys, epoch)
        filtered = order(LENGTHS, replace(keys, seq_list_filter_file="tags"), epoch, listed)
        assert filtered.tolist() == [index for index in whole.tolist() if index in listed]
    with pytest.raises(DataError, match="epoch 2: expected at least one of its sequences in seq_list_filter_file"):
        order(LENGTHS, OrderKeys(partition_epoch=2, seq_list_filter_file="tags"), 2, numpy.array([0]))


def test_an_epoch_of_which_nothing_is_left_is_an_error() -> None:
    with pytest.raises(DataError, match="epoch 2: expected at least one of its 12 sequences to be left, got none"):
        plan({"data": LENGTHS}, OrderKeys(), BatchKeys(max_seqs=9, min_seq_length=11), 2)


def test_a_list_is_read_from_text_and_gzip(tmp_path: Path) -> None:
    (tmp_path / "tags").write_text("seq-3\n\n  seq-1 \nä/b c\n", encoding="utf-8")
    (tmp_path / "tags.gz").write_bytes(gzip.compress((tmp_path / "tags").read_bytes()))
    assert read_tags(tmp_path / "tags") == read_tags(tmp_path / "tags.gz") == {"seq-3", "seq-1", "ä/b c"}


def test_lists_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_text("seq-1")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"seq-1\n" * 100)[:-9])
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"seq-1\n" * 100)[:12] + b"\xff" * 30)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("none", "text.gz", "cut.gz", "broken.gz", "bytes", "."):
        with pytest.raises(DataError, match="seq_list_filter_file: expected a text file with a tag on each line, got "):
            read_tags(tmp_path / name)


def test_the_sequences_of_a_list_are_found_by_their_tags(corpus: Path, tmp_path: Path) -> None:
    dataset = open_hdf([corpus / "dev.hdf", corpus / "dev.hdf"])
    (tmp_path / "tags").write_text("seq-100\nseq-1\nother\n")
    found = find_listed(dataset, str(tmp_path / "tags"))
    assert found.tolist() == [1, 100, 102, 201]  # in order of the data
    assert found.dtype == numpy.int64
    assert find_listed(dataset, None) is None
    (tmp_path / "tags").write_text("other\n")
    with pytest.raises(DataError, match=r"expected tags of the dataset, such as 'seq-0', got none among the 1 in .*tags"):
        find_listed(dataset, str(tmp_path / "tags"))
    dataset.close()


@pytest.mark.parametrize("method", ["default", "reverse", "random", "sorted", "laplace:3", "random_blocks:2"])
def test_an_order_of_some_is_that_of_a_dataset_without_the_others(method: str) -> None:
    subset = numpy.array([1, 2, 5, 6, 8, 9, 11])
    for epoch in (1, 2, 3, 4):
        keys = OrderKeys(seq_ordering=method, partition_epoch=3, repeat_epoch=2)
        expected = subset[order(LENGTHS[subset], keys, epoch)]
        assert order(LENGTHS, keys, epoch, subset).tolist() == expected.tolist()


def test_parts_of_a_list_are_even() -> None:
    """RETURNN filters the parts, so that a list of neighbours can leave some of them empty."""
    parts = [order(LENGTHS, OrderKeys(partition_epoch=2), epoch, numpy.arange(4)).tolist() for epoch in (1, 2)]
    assert parts == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="partition_epoch: expected at most 4, the number of sequences, got 5"):
        order(LENGTHS, OrderKeys(partition_epoch=5), 1, numpy.arange(4))
