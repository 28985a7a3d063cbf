"""From a config's keys to the batches of a rank and the lines of its log, on one rank and without a framework."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.describe import batch_lines, feed_lines
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.chunks.keys import ChunkKeys
from hvdtrain.report.epoch import EpochReport
from hvdtrain.settings import Settings, read_settings
from hvdtrain.start_up.data import open_feeds

CONFIG = """\
model = "exp/model"
train = {{"class": "HDFDataset", "files": ["{corpus}/train.hdf"]}}
dev = "{corpus}/dev.hdf"
learning_rate = 0.1
def get_model(**_): ...
def train_step(**_): ...
{more}
"""


def settings(folder: Path, corpus: Path, more: str, **overrides: str) -> Settings:
    path = folder / "config.py"
    path.write_text(CONFIG.format(corpus=corpus, more=more))
    return read_settings([path], overrides)


def opened(folder: Path, corpus: Path, more: str, **overrides: str) -> list[Feed]:
    return open_feeds(settings(folder, corpus, more, **overrides), SingleCommunicator())


def read(feed: Feed, epoch: int = 1) -> list[Any]:
    with feed.read(feed.rank_batches(feed.plan(epoch)), epoch) as batches:
        return list(batches)


def test_evaluation_has_sizes_of_its_own_and_stays_whole_and_in_order(tmp_path: Path, corpus: Path) -> None:
    more = "max_seqs = 7\nmax_seqs_dev = -1\nbatch_size_dev = 24\nchunking = {'data': 4, 'classes': 4}\nshuffle_batches = True"
    train, dev = opened(tmp_path, corpus, more)
    assert (train.chunks is None, dev.chunks is None) == (False, True)
    assert max(len(batch.indices) for batch in read(train)) == 7
    assert max(batch.data["data"].values.shape[1] for batch in read(train)) == 4
    dev_batches = read(dev)
    assert max(len(batch.indices) for batch in dev_batches) > 7
    assert max(batch.data["data"].values.shape[:2][0] * batch.data["data"].values.shape[1] for batch in dev_batches) <= 24
    longest = [batch.data["data"].values.shape[1] for batch in dev_batches]
    assert longest == sorted(longest)


def test_an_epoch_may_have_its_first_batches_only(tmp_path: Path, corpus: Path) -> None:
    keys = "max_seqs = 3\ntrain['max_batches'] = lambda *, epoch, **_: epoch\ntrain['seq_ordering'] = 'random'"
    limited, whole = opened(tmp_path, corpus, keys)[0], opened(tmp_path, corpus, keys.replace(": epoch", ": None"))[0]
    for ranks, epoch in ((1, 1), (1, 2), (2, 2)):
        some, everything = (replace(feed, size=ranks, made_for=ranks).plan(epoch) for feed in (limited, whole))
        assert some.num_batches == ranks * epoch
        assert some.order.tolist() == everything.order[: 3 * ranks * epoch].tolist()
    assert limited.inputs(2).checksum() != whole.inputs(2).checksum()
    wrong = opened(tmp_path, corpus, keys.replace(": epoch", ": 0"))[0]
    with pytest.raises(DataError, match="max_batches: expected the function to return a positive number or None, got 0"):
        wrong.plan(1)


def test_every_frame_is_read_once_under_chunks_and_balance(tmp_path: Path, corpus: Path) -> None:
    more = "batch_size = 16\nchunking = ({'data': 4, 'classes': 4}, {'data': 4, 'classes': 4})\nbalance_ranks = 4"
    train, _ = opened(tmp_path, corpus, more, **{"train.seq_ordering": "random_blocks:10"})
    made = train.plan(1)
    frames = [
        tuple(frame)
        for batch in read(train)
        for row, length in zip(batch.data["data"].values, batch.data["data"].seq_lens, strict=True)
        for frame in row[:length].tolist()
    ]
    assert len(frames) == len(set(frames)) == int(train.dataset.lengths["data"].sum())
    assert train.sequences_among(made.order) == 231
    assert made.padding(train.lengths)["id"] == 0.0


def test_what_is_left_out_is_reported_once(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "tags.gz").write_bytes(gzip.compress("".join(f"seq-{number}\n" for number in range(50)).encode()))
    more = f"batch_size = 10\nmax_seq_length = {{'data': 11}}\ntrain['seq_list_filter_file'] = '{tmp_path}/tags.gz'"
    train, dev = opened(tmp_path, corpus, more)
    frames = train.dataset.lengths["data"][:50]
    lines = feed_lines(train)
    assert lines[0][1].startswith("train: 231 sequences, default")
    assert lines[1] == (4, f"train: 50 of them are listed in {tmp_path}/tags.gz")
    assert lines[2] == (2, f"train: a full epoch loses {(frames > 11).sum()} of 50 sequences, too short or too long")
    alone = (frames == 11).sum()
    assert lines[3] == (2, f"train: {alone} sequences are longer than batch_size allows: each makes a batch by itself")
    assert len(lines) == 4
    assert sorted(train.plan(1).order.tolist()) == [index for index, length in enumerate(frames) if length <= 11]
    assert [level for level, _ in feed_lines(dev)] == [4, 2, 2]


def test_nothing_is_reported_if_nothing_is_left_out(tmp_path: Path, corpus: Path) -> None:
    growing = "def growing(**_):\n    return 'random'\ntrain['seq_ordering'] = growing\n"
    train, _ = opened(tmp_path, corpus, "max_seqs = 3\nchunking = 3\nmax_seq_length = 100\n" + growing)
    (_, first), (level, second) = feed_lines(train)
    assert first.startswith("train: 231 sequences, growing")
    assert (level, second) == (4, f"train: {len(train.chunks.sequences)} chunks of 231 sequences")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("batch_size = {'x': 3}", "batch_size: expected data keys of train (data, classes, id), got 'x'"),
        (
            "batch_size = 3\npacked_batch_size = {'x': 3}",
            "packed_batch_size: expected data keys of train (data, classes, id), got ",
        ),
        ("batch_size = 3\npacked = ['x']", "packed: expected data keys of train (data, classes, id), got 'x'"),
        ("batch_size = 3\nchunking = {'x': 3}", "chunking: expected data keys of train (data, classes, id), got 'x'"),
        ("batch_size = 3\nmin_chunk_size = {'x': 3}", "min_chunk_size: expected data keys of train (data, classes, id), got 'x'"),
        (
            "batch_size = 3\ntrain['seq_list_filter_file'] = 'none'",
            "seq_list_filter_file: expected a text file with a tag on each",
        ),
    ],
)
def test_data_keys_and_files_that_are_not_there(tmp_path: Path, corpus: Path, more: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        opened(tmp_path, corpus, more)
    assert str(caught.value).startswith(expected)


def test_limits_of_data_keys_that_are_not_there(tmp_path: Path, corpus: Path) -> None:
    """The batches are those without them, as in RETURNN."""
    without, _ = opened(tmp_path, corpus, "max_seqs = 3\nmax_seq_length = {'data': 8}\nbatch_size = {'data': 60}")
    absent = "max_seqs = 3\nmax_seq_length, min_seq_length = {'data': 8, 'x': 3}, {'x': 9}\nmax_pad_size = {'x': 0}\n"
    train, _ = opened(tmp_path, corpus, absent + "batch_size = {'data': 60, 'x': 2}")
    assert train.plan(1).fingerprint == without.plan(1).fingerprint


def test_problems_of_the_new_keys_are_reported_with_all_others(tmp_path: Path, corpus: Path) -> None:
    more = "batch_size = {'data': 0}\nchunking = 4\nmin_chunk_size = 5\nchunking_tail = 'drop_short'\nmax_pad_size = {'data': -1}"
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, corpus, more, balance_ranks="-1", max_seqs="-2")
    names = [problem.key for problem in caught.value.problems]
    assert sorted(names) == ["balance_ranks", "max_seqs", "min_chunk_size"]
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, corpus, more)
    assert [problem.key for problem in caught.value.problems] == ["batch_size", "max_pad_size", "min_chunk_size"]


def test_keys_on_the_command_line(tmp_path: Path, corpus: Path) -> None:
    made = settings(tmp_path, corpus, "", chunking="50:25", batch_size="{'data': 4}", max_seqs="-1", shuffle_batches="true")
    assert (made.of(ChunkKeys).chunking, made.batch.batch_size, made.batch.max_seqs) == ("50:25", {"data": 4}, -1)
    assert made.batch.shuffle_batches is True


def test_the_line_about_padding_stands_beside_the_epochs_own() -> None:
    report = EpochReport(
        epoch=3,
        steps=10,
        global_step=30,
        elapsed=61.0,
        computing=0.993,
        learning_rate=0.1,
        num_sequences=5,
        scores={},
        padding={"data": 0.1234, "classes": 0.5},
    )
    assert report.line == "train epoch 3, finished after 10 steps, 0:01:01 elapsed (99.3% computing time)"
    assert (4, "train epoch 3, padding: data 12.3%, classes 50.0%") in report.training_lines()


def test_what_closes_a_batch_is_reported_per_rank_and_in_all() -> None:
    assert batch_lines(BatchKeys(max_seqs=-1, batch_size=30, packed_batch_size={"data": 20}), 1, 4) == [
        (4, "batch, at most: 30 padded frames per rank, 120 in all; {'data': 20} frames without padding per rank")
    ]
    assert batch_lines(BatchKeys(max_seqs=lambda epoch, **_: epoch, balance_ranks=8), 5, 2) == [
        (4, "batch, at most: 5 sequences per rank, 10 in all")
    ]
    (level, line) = batch_lines(BatchKeys(max_seqs=5, balance_ranks=4), 1, 3)[1]
    assert level == 2
    assert line.startswith("balance_ranks: 4 is not a multiple of the 3 ranks")
