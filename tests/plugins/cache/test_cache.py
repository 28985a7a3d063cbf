"""What was read stays in memory, within a budget."""

from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.describe import feed_lines
from hvdtrain.data.feed import Feed
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.views import OneAtATime
from hvdtrain.plugins.cache import parse_sizes
from hvdtrain.plugins.cache.budget import PER_ARRAY, PER_SEQUENCE, Budget, CachedDataset
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.settings import read_settings
from hvdtrain.start_up.data import open_feeds


@pytest.fixture
def compressed(tmp_path: Path) -> Dataset:
    """20 sequences of 10 frames with 4 float32 features, compressed; their classes (int32) contiguous."""
    with HDFWriter(tmp_path / "plain.hdf", dims={"classes": 3}) as writer:
        for number in range(20):
            frames = numpy.full((10, 4), number, numpy.float32)
            writer.add(f"seq-{number}", {"data": frames, "classes": numpy.full(5, number % 3, numpy.int32)})
    with h5py.File(tmp_path / "plain.hdf", "r+") as file:
        values = file["inputs"][:]
        del file["inputs"]
        file.create_dataset("inputs", data=values, chunks=(10, 4), compression="gzip")
    return open_hdf([tmp_path / "plain.hdf"])


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        (0, [0, 0, 0]),
        ("0", [0, 0, 0]),
        (-1, [None, 0, 0]),
        ("-1", [None, 0, 0]),
        ("2G", [2 << 30, 0, 0]),
        ("1.5k", [1536, 0, 0]),
        (["1M", 5, "-1"], [1 << 20, 5, None]),
        ("1M,2M,3M", [1 << 20, 2 << 20, 3 << 20]),
    ],
)
def test_sizes(value: int | str | list[int | str], sizes: list[int | None]) -> None:
    assert parse_sizes(value) == sizes


@pytest.mark.parametrize("value", ["", "2T", "much", "1,2,3,4", [1, 2, 3, 4], "1G G", "inf", "nan", "-infG"])
def test_sizes_that_are_none(value: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the key's rule words the message
        parse_sizes(value)


def test_a_cache_gives_the_same_and_reads_once(compressed: Dataset) -> None:
    reference = [compressed.sequence(index) for index in range(20)]
    cached = CachedDataset(compressed, Budget(None)).at_epoch(1)
    for _ in range(2):
        for index in numpy.random.default_rng(1).permutation(20).tolist():
            assert all(numpy.array_equal(values, reference[index][key]) for key, values in cached.sequence(index).items())
    assert len(cached._cached) == 20
    compressed.close()  # nothing is read any more
    assert cached.sequence(7)["data"][0, 0] == 7


def test_the_budget_is_kept_in_true_bytes_without_what_is_mapped(compressed: Dataset) -> None:
    assert compressed.memory_mapped == {"classes"}
    one = 10 * 4 * 4 + PER_ARRAY + PER_SEQUENCE
    budget = Budget(3 * one + 10)
    cached = CachedDataset(compressed, budget)
    for index in range(20):
        cached.sequence(index)
    assert not budget.used  # what is read before the first epoch, perhaps by other processes
    cached = cached.at_epoch(1)
    for index in range(20):
        cached.sequence(index)
    assert len(cached._cached) == 3
    assert budget.used == 3 * one
    assert cached.sequence(19)["data"][0, 0] == 19


def test_changing_what_was_given_changes_nothing_in_the_cache(compressed: Dataset) -> None:
    cached = CachedDataset(compressed, Budget(None)).at_epoch(1)
    del cached.sequence(1)["data"]
    assert "data" in cached.sequence(1)
    with pytest.raises(ValueError, match="read-only"):
        cached.sequence(1)["data"][0, 0] = 5


def test_mapped_files_and_empty_budgets_need_no_cache(compressed: Dataset, tmp_path: Path) -> None:
    assert Budget(0).keep(compressed) is compressed
    assert isinstance(Budget(100).keep(compressed), CachedDataset)
    with HDFWriter(tmp_path / "mapped.hdf") as writer:
        writer.add("a", {"data": numpy.zeros((2, 2), numpy.float32)})
    (feed,) = feeds(tmp_path, f"train = '{tmp_path}/mapped.hdf'\ncache_size = '2G'")
    assert isinstance(feed.dataset, OneAtATime)
    assert isinstance(feed.dataset._dataset, Dataset)
    assert [line for _, line in feed_lines(feed)] == [
        "train: 1 sequences, default; data memory-mapped; 16 bytes",
        "train: no cache: all data is memory-mapped; the system caches it for all ranks of the host",
    ]


# ------------------------------------------------------------------------------------------- from a config's keys

CONFIG = """
model = "exp/model"
learning_rate = 0.1
def get_model(**_): ...
def train_step(**_): ...
max_seqs = 4
"""


def feeds(folder: Path, more: str) -> list[Feed]:
    path = folder / "config.py"
    path.write_text(CONFIG + more)
    return open_feeds(read_settings([path], {}), SingleCommunicator())


class Reads:
    """Counts what a cache asks the dataset inside it for."""

    def __init__(self, cache: CachedDataset) -> None:
        self.indices: list[int] = []
        inside = cache._dataset.sequence

        def sequence(index: int) -> dict[str, Any]:
            self.indices.append(index)
            return inside(index)

        cache._dataset.sequence = sequence  # type: ignore[method-assign]


def numbers(feed: Feed, epoch: int) -> list[float]:
    """What the first feature of each sequence is, in the order of an epoch: the sequence's number."""
    with feed.read(feed.rank_batches(feed.plan(epoch)), epoch) as batches:
        return [number for batch in batches for number in batch.data["data"].values[:, 0, 0].tolist()]


def test_a_cache_survives_epochs_parts_of_the_data_and_random_orders(compressed: Dataset, tmp_path: Path) -> None:
    more = f"train = {{'files': '{tmp_path}/plain.hdf', 'seq_ordering': 'random', 'partition_epoch': 4}}\ncache_size = '1M'"
    (feed,) = feeds(tmp_path, more)
    assert isinstance(feed.cache, Budget)
    reads = Reads(feed.cache.caches[0])
    seen = [numbers(feed, epoch) for epoch in range(1, 13)]
    assert [sorted(sum(seen[start : start + 4], [])) for start in (0, 4, 8)] == [list(range(20))] * 3
    assert seen[:4] != seen[4:8]
    assert sorted(reads.indices) == list(range(20))  # each once in twelve epochs
    line = feed_lines(feed, local_size=3)[1]
    assert line == (4, "train: cache: up to 9.5 KB per rank, 28.4 KB on this host; 9.5 KB would hold all of it")


def test_joined_and_mapped_data_is_kept_where_it_is_read(compressed: Dataset, tmp_path: Path) -> None:
    more = f"""
calls = []
def noisy(arrays):
    calls.append(1)
    return {{**arrays, "data": arrays["data"] + 100 * len(calls)}}
both = {{
    "class": "MetaDataset",
    "datasets": {{"frames": "{tmp_path}/plain.hdf", "names": "{tmp_path}/plain.hdf"}},
    "data_map": {{"data": ("frames", "data"), "classes": ("names", "classes")}},
}}
train = {{"class": "MapDataset", "dataset": both, "map_seq": noisy, "seq_ordering": "default"}}
cache_size = "-1"
"""
    (feed,) = feeds(tmp_path, more)
    assert isinstance(feed.cache, Budget)
    reads = [Reads(cache) for cache in feed.cache.caches]
    first, second = numbers(feed, 1), numbers(feed, 2)
    assert first == [number + 100 * (number + 1) for number in range(20)]
    assert second == [number + 100 * (number + 21) for number in range(20)]  # the function is called in every epoch anew
    assert [read.indices for read in reads] == [list(range(20))] * 2


def test_many_files_keep_their_bounds_and_close_under_a_cache(compressed: Dataset, tmp_path: Path) -> None:
    more = f"train = {{'class': 'FilesDataset', 'files': 3 * ['{tmp_path}/plain.hdf'], 'max_open_files': 1}}\ncache_size = -1"
    (feed,) = feeds(tmp_path, more)
    assert isinstance(feed.dataset, OneAtATime)
    dataset = feed.dataset._dataset
    assert isinstance(dataset, CachedDataset)
    assert dataset.file_bounds().tolist() == [0, 20, 40, 60]
    assert dataset.tag_bytes(19, 21).tolist() == [b"seq-19", b"seq-0"]
    assert numbers(feed, 1) == numbers(feed, 2) == 3 * list(range(20))
    dataset._dataset.close()
    assert dataset.sequence(45)["classes"].tolist() == [2] * 5  # not a view of the file, though that one is mapped there


def test_budgets_of_three_datasets_and_of_workers(compressed: Dataset, tmp_path: Path) -> None:
    more = f"""
train = {{"class": "MapDataset", "dataset": "{tmp_path}/plain.hdf", "map_seq": lambda arrays: arrays, "num_workers": 2}}
dev = eval = "{tmp_path}/plain.hdf"
eval_datasets = {{"more": "{tmp_path}/plain.hdf"}}
cache_size = ["100K", 5000, 0]
"""
    opened = feeds(tmp_path, more)
    budgets = [feed.cache for feed in opened if isinstance(feed.cache, Budget)]
    assert [budget.size for budget in budgets] == [100 << 10, 5000, 0, 0]
    assert [len(budget.caches) for budget in budgets] == [1, 1, 0, 0]
    inner = budgets[0].caches[0]
    assert inner._budget.size == inner.size() == budgets[0].used / 2  # each worker process keeps what it reads
    assert numbers(opened[0], 1) == numbers(opened[0], 2) == list(range(20))
    for feed in opened:
        feed.dataset.close()


def test_all_ranks_of_a_host_share_its_memory(compressed: Dataset) -> None:
    host = Budget(1000)
    assert (Budget(None, within=host).size, Budget(10, within=host).size, Budget(5000, within=host).size) == (1000, 10, 1000)
    train, dev = Budget(None, within=host), Budget(600, within=host)
    assert (train.take(500), dev.take(600), dev.take(400), train.take(101), train.take(100)) == (True, False, True, False, True)
    assert [Budget(own, within=host).is_limited_by_host(2000) for own in (None, 10, 1500)] == [True, False, True]
    assert not Budget(None, within=host).is_limited_by_host(900)
    host = Budget(1000)
    workers, more = Budget(None, within=host).shared_by(2), Budget(None, within=host).shared_by(3)
    assert (workers.size, more.size) == (500, 333)
    workers.reserve(300)
    more.reserve(300)  # the first ones may cache all of their dataset
    assert [workers.take(300), workers.take(1), more.take(133), more.take(1), host.used] == [True, False, True, False, 1000]
