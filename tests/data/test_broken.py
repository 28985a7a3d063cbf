"""The count of broken sequences."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from opened_data import opened

import hvdtrain
from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.data.types import Batch
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.chunks.fixed import make_chunks
from hvdtrain.plugins.chunks.keys import ChunkKeys
from hvdtrain.training.account import Account


def test_each_sequence_counts_once_over_ranks_and_epochs() -> None:
    ranks = [BrokenSequences("train", 3) for _ in range(2)]
    ranks[0].leave_out(["no audio"], 9)
    ranks[1].leave_out(["no audio"], 9)
    ranks[0].add([(5, "a.wav")])
    for _ in range(2):
        found = [rank.take() for rank in ranks]
        lines = [rank.merge(found) for rank in ranks]
    assert lines == [[], []]
    assert [rank.number for rank in ranks] == [2, 2]
    ranks[1].add([(5, "a.wav")])
    assert ranks[1].take() == []
    ranks[1].add([(6, "b.wav")])
    ranks[0].add([(7, "c.wav")])
    found = [rank.take() for rank in ranks]
    for rank in ranks:
        with pytest.raises(
            BrokenSequence, match=r"at most 3 broken sequences \(skip_broken\), got 4 broken: c.wav; b.wav"
        ) as raised:
            rank.merge(found)
        assert raised.value.on_every_rank


def test_a_rank_that_finds_too_many_does_not_wait_for_the_others() -> None:
    broken = BrokenSequences("train", 1)
    with pytest.raises(BrokenSequence, match="got 2 broken: a; b$"):
        broken.add([(1, "a"), (2, "b")])


def test_a_dataset_of_which_no_rank_could_read_a_sequence_is_an_error_on_all() -> None:
    ranks = [BrokenSequences("dev", 3) for _ in range(2)]
    ranks[0].add([(5, "a.wav")])
    found = [rank.take() for rank in ranks]
    ranks[1].check_any(has_read=False)  # it knows of none
    for rank in ranks:
        rank.merge(found)
        rank.check_any(has_read=True)
        with pytest.raises(BrokenSequence, match=r"dev: expected .* got only broken ones: a.wav") as raised:
            rank.check_any(has_read=False)
        assert raised.value.on_every_rank


def test_a_batch_knows_what_was_planned() -> None:
    batch = Batch({}, numpy.array([4, 2]), broken=[(9, "a.wav")])
    assert batch.planned.tolist() == [4, 2, 9]
    assert batch.if_any is batch
    assert Batch({}, numpy.array([], numpy.int64), broken=[(9, "a.wav")]).if_any is None


class Items:
    """Items of a user's own, of which some cannot be read."""

    lengths = [3, 4, 5, 6, 7, 8]

    def __init__(self, broken: tuple[int, ...]) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> numpy.ndarray:
        if index in self._broken:
            raise hvdtrain.BrokenSequence(f"item {index} is gone")
        return numpy.full((self.lengths[index], 2), index, numpy.float32)


def batches_of(dataset: Dataset, limit: int, size: int = 1, rank: int = 0, chunking: int = 0) -> list[Batch]:
    chunks = make_chunks(dataset.lengths, ChunkKeys(chunking=chunking)) if chunking else None
    broken = BrokenSequences("train", limit)
    keys = OrderKeys(seq_ordering="default"), BatchKeys(max_seqs=2)
    feed = Feed("train", dataset, *keys, rank, size, chunks=chunks, broken=broken)
    with feed.read(feed.rank_batches(feed.plan(1)), 1) as batches:
        return list(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_own_items_are_left_out_of_their_batches(workers: int) -> None:
    inside = {"class": lambda: Items((2, 3, 5))}
    options = {"class": "MapDataset", "dataset": inside, "map_seq": lambda arrays: arrays, "num_workers": workers}
    dataset = opened(options)
    found = batches_of(dataset, 3)
    assert [batch.indices.tolist() for batch in found] == [[0, 1], [], [4]]
    assert [sorted(batch.planned.tolist()) for batch in found] == [[0, 1], [2, 3], [4, 5]]
    assert [batch.left_out for batch in found] == [0, 2, 1]
    assert found[2].broken == [(5, "item 5 is gone")]
    assert found[2].data["data"].values.shape == (1, 7, 2)
    assert found[1].if_any is None
    assert found[0].seq_tags is not None
    with pytest.raises(BrokenSequence, match=r"train: item 2 is gone \(skip_broken = N lets a training continue"):
        batches_of(dataset, 0)
    dataset.close()


class Unlike(Items):
    """Some have frames of another shape."""

    def __getitem__(self, index: int) -> numpy.ndarray:
        return numpy.zeros((self.lengths[index], 3 if index in self._broken else 2), numpy.float32)


def test_what_is_broken_from_the_beginning_is_named() -> None:
    with pytest.raises(BrokenSequence, match="^train: expected an item that can be read, got: item 0 is gone"):
        opened({"class": lambda: Items((0,))})

    def iterable() -> Any:
        yield numpy.zeros((3, 2))
        raise BrokenSequence("the disk is gone")

    with pytest.raises(DataError, match="^train: expected item 1 of epoch 1 of iterable, got: the disk is gone"):
        opened({"class": iterable})


def test_items_that_are_not_like_the_first_one_are_broken() -> None:
    dataset = opened({"class": lambda: Unlike((2, 5))})
    assert [batch.indices.tolist() for batch in batches_of(dataset, 2)] == [[0, 1], [3], [4]]
    with pytest.raises(BrokenSequence, match=r"^train, item 2, .* as in item 0, got .* \(skip_broken = N lets"):
        batches_of(dataset, 0)
    counted = opened({"class": lambda: list(Unlike((2, 5)))}, scanning=Scanning(broken=BrokenSequences("train", 2)))
    assert [batch.indices.tolist() for batch in batches_of(counted, 2)] == [[0, 1], [2, 3]]
    with pytest.raises(BrokenSequence, match=r"got 2 broken: train, item 2, .* as in item 0, got .*; train, item 5"):
        opened({"class": lambda: list(Unlike((2, 5)))})


def test_rows_that_are_broken_while_lengths_are_counted_are_no_sequences(tmp_path: Path) -> None:
    (tmp_path / "units").write_text("a\nb\n")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(6):
            about = tarfile.TarInfo(f"seq-{number}.txt")
            about.size = 3
            archive.addfile(about, io.BytesIO(b"\xff\xfe\xfa" if number in (0, 3) else b"aba"))
    value = {"class": "TarDataset", "files": [str(tmp_path / "a.tar")], "vocabulary": {"txt": str(tmp_path / "units")}}
    for _ in range(2):  # the second time, lengths are known
        limited = BrokenSequences("train", 2)
        dataset = opened(value, scanning=Scanning(tmp_path / "lengths", broken=limited))
        assert dataset.tags(range(4)) == [tag.decode() for tag in dataset.tag_bytes(0, 4)] == ["seq-1", "seq-2", "seq-4", "seq-5"]
        assert dataset.file_bounds().tolist() == [0, dataset.num_sequences] == [0, 4]
        assert [dataset.sequence(index)["txt"].tolist() for index in range(4)] == [[0, 1, 0]] * 4
        assert limited.warnings()[0].startswith("2 broken sequences are left out")
    with pytest.raises(BrokenSequence, match="at most 1 broken sequences .*, got 2 broken"):
        opened(value, scanning=Scanning(broken=BrokenSequences("train", 1)))


def test_all_chunks_of_a_broken_sequence_are_left_out() -> None:
    found = batches_of(opened({"class": lambda: Items((1,))}), 1, chunking=3)
    planned = [index for batch in found for index in batch.planned.tolist()]
    assert sorted(planned) == [0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5]
    assert [index for batch in found for index in batch.indices.tolist()] == [index for index in sorted(planned) if index != 1]
    assert {index for batch in found for index, _ in batch.broken} == {1}
    assert sum(batch.left_out for batch in found) == 1  # of two chunks


@pytest.mark.parametrize("keys", [{"max_seqs": 2, "packed": True}, {"batch_size": 5, "frame_batches": True}], ids=str)
def test_batches_without_padding_are_read_without_it_too(keys: dict[str, Any]) -> None:
    dataset = opened({"class": lambda: Items((2, 3))})
    feed = Feed("train", dataset, OrderKeys(seq_ordering="default"), BatchKeys(**keys), 0, 1)
    feed = replace(feed, broken=BrokenSequences("train", 2))
    plan = feed.plan(1)
    account = Account(feed, plan)
    with feed.read(feed.rank_batches(plan), 1) as batches:
        found = list(batches)
    for batch in found:
        account.add(batch.planned)
    account.check("test", [account.take(plan.num_batches)])  # nothing is missing, and nothing is used twice
    assert {index for batch in found for index in batch.indices.tolist()} == {0, 1, 4, 5}
    assert {index for batch in found for index, _ in batch.broken} == {2, 3}
    assert sum(batch.left_out for batch in found) == 2
    arrays = [batch.data["data"].values for batch in found if batch.if_any]
    frames = sum(len(values) if keys.get("packed") else values.shape[1] for values in arrays)
    assert frames == 3 + 4 + 7 + 8


@pytest.mark.parametrize("keys", [{"max_seqs": 3}, {"batch_size": 7, "frame_batches": True}], ids=str)
def test_a_broken_sequence_that_a_mix_draws_several_times_counts_once(keys: dict[str, Any]) -> None:
    datasets = {"good": {"class": lambda: Items(())}, "bad": {"class": lambda: Items((1,))}}
    dataset = opened({"class": "MixingDataset", "datasets": datasets, "weights": {"good": 1, "bad": 3}})
    limited = BrokenSequences("train", 1)
    feed = Feed("train", dataset, OrderKeys(seq_ordering="random"), BatchKeys(**keys), 0, 1, broken=limited)
    plan = feed.plan(1)
    assert feed.sequences_among(plan.order) == 4 * 6  # three times all of the second dataset
    account = Account(feed, plan)
    with feed.read(feed.rank_batches(plan), 1) as batches:
        found = list(batches)
    for batch in found:
        account.add(batch.planned)
        limited.add(batch.broken)
        assert batch.parts is not None
        assert batch.parts.numbers.tolist() == [int(index >= 6) for index in batch.indices.tolist()]
    account.check("test", [account.take(plan.num_batches)])
    assert sum(batch.left_out for batch in found) == 3
    assert limited.number == 1
