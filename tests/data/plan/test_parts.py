"""Epochs over whole files, and over samples of several datasets."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import faults
from returnn.datasets.meta import CombinedDataset

from hvdtrain.data.combine.files import FilesDataset
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.feed import Feed
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.opening import open_dataset
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order import order, part_of_files
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import DataError
from hvdtrain.plugins.hdf_tools.dump import main
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

SIZES = [3, 1, 4, 1, 5, 2, 6]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of different sizes, whose sequences are numbered through."""
    folder = tmp_path_factory.mktemp("parts")
    number = 0
    for name, size in enumerate(SIZES):
        with HDFWriter(folder / f"{name}.hdf", dims={"data": 100}) as writer:
            for _ in range(size):
                writer.add(f"seq-{number}", {"data": numpy.full(1 + number % 3, number)})
                number += 1
    return [str(folder / f"{name}.hdf") for name in range(len(SIZES))]


def opened(value: Any) -> tuple[Dataset, OrderKeys]:
    spec, problems = parse("train", value, {})
    assert spec is not None, problems
    return open_dataset(spec), spec.order


def planned(dataset: Dataset, keys: OrderKeys, epoch: int, **more: Any) -> list[int]:
    return Feed("train", dataset, keys, BatchKeys(max_seqs=2), 0, 1, **more).plan(epoch).order.tolist()


def test_an_epoch_opens_its_own_files_only_and_a_full_one_goes_through_all(paths: list[str]) -> None:
    value = {"class": "FilesDataset", "files": paths, "seq_ordering": "random", "partition_epoch": 3, "partition_by": "files"}
    dataset, keys = opened(value)
    assert isinstance(dataset, FilesDataset)
    pool = dataset._dataset._pool
    by_full_epoch = []
    for full_epoch in range(2):
        seen: list[int] = []
        files = []
        for epoch in range(3 * full_epoch + 1, 3 * full_epoch + 4):
            indices = planned(dataset, keys, epoch)
            assert indices == planned(dataset, keys, epoch)
            used = set((numpy.searchsorted(dataset.file_bounds(), indices, side="right") - 1).tolist())
            assert sorted(indices) == sorted(index for file in used for index in range(*dataset.file_bounds()[file : file + 2]))
            dataset.close()
            feed = Feed("train", dataset, keys, BatchKeys(max_seqs=2), 0, 1)
            with feed.read(feed.rank_batches(feed.plan(epoch)), epoch) as batches:
                read = [index for batch in batches for index in batch.indices.tolist()]
            assert read == indices
            assert len(pool._open) == len(used)
            seen += indices
            files.append(used)
        assert sorted(seen) == list(range(sum(SIZES)))
        assert all(files)
        by_full_epoch.append(files)
    assert by_full_epoch[0] != by_full_epoch[1]
    dataset.close()


def test_parts_are_of_about_the_same_number_of_frames() -> None:
    generator = numpy.random.RandomState(0)
    lengths = generator.randint(1, 100, 20000)
    which = numpy.sort(generator.randint(0, 300, len(lengths)))
    everything: list[int] = []
    frames = []
    for number in range(7):
        places = part_of_files(lengths, which, 7, number, numpy.random.RandomState(1))
        everything += places.tolist()
        frames.append(lengths[places].sum())
        assert (numpy.diff(which[places]) != 0).sum() == len(set(which[places].tolist())) - 1, "file after file"
    assert sorted(everything) == list(range(len(lengths)))
    assert max(frames) < 1.1 * min(frames)


def test_files_in_order_and_lists_of_tags() -> None:
    lengths = numpy.full(10, 5)
    bounds = numpy.array([0, 3, 3, 4, 8, 10])  # one has no sequences
    keys = OrderKeys(partition_epoch=2, partition_by="files")
    assert [order(lengths, keys, epoch, None, bounds).tolist() for epoch in (1, 2, 3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9],
        [0, 1, 2, 3],
    ]
    subset = numpy.array([1, 8, 9])
    assert [order(lengths, keys, epoch, subset, bounds).tolist() for epoch in (1, 2)] == [[1], [8, 9]]
    with pytest.raises(DataError, match="partition_epoch: expected at most 2, the number of files .*, got 3"):
        order(lengths, OrderKeys(partition_epoch=3, partition_by="files"), 1, subset, bounds)
    with pytest.raises(DataError, match="expected at most 1, the number of files"):
        order(lengths, keys, 1)


def test_every_dataset_of_files_tells_where_they_begin(paths: list[str]) -> None:
    bounds = numpy.cumsum([0, *SIZES]).tolist()
    plain = {"class": "HDFDataset", "files": paths}
    for value in (
        plain,
        {"class": "FilesDataset", "files": paths},
        {"class": "ConcatDataset", "datasets": [paths[:2], paths[2], paths[3:]]},
        {"class": "MapDataset", "dataset": plain, "map_seq": lambda arrays: arrays},
        {"class": "MetaDataset", "datasets": {"a": plain}, "data_map": {"data": ("a", "data")}},
    ):
        dataset, _ = opened(value)
        assert dataset.file_bounds().tolist() == bounds, value
        dataset.close()
    synthetic, _ = opened({"class": "Task12AXDataset", "num_seqs": 5})
    assert synthetic.file_bounds().tolist() == [0, 5]


COMBINED = {
    "class": "CombinedDataset",
    "data_map": {("a", "data"): "data", ("b", "data"): "data"},
    "sampling_sizes": {"a": 2, "b": 5},
}


@pytest.mark.parametrize("ordering", ["default", "random", "sorted"])
def test_samples_are_those_of_returnn(paths: list[str], ordering: str) -> None:
    combined = {
        **COMBINED,
        "datasets": {"a": {"class": "HDFDataset", "files": [paths[0]]}, "b": {"class": "HDFDataset", "files": [paths[4]]}},
        "seq_ordering": ordering,
    }
    # Not by init_dataset: it begins with an epoch of no sequences, in which RETURNN's sampling divides by zero.
    theirs = CombinedDataset(**{name: option for name, option in combined.items() if name != "class"})
    ours, keys = opened(combined)
    for epoch in (1, 2, 3, 4):
        theirs.init_seq_order(epoch)
        tags = []
        while theirs.is_less_than_num_seqs(len(tags)):
            theirs.load_seqs(len(tags), len(tags) + 1)
            tags.append(theirs.get_tag(len(tags)))
        assert ours.tags(planned(ours, keys, epoch)) == tags, epoch


def test_samples_are_taken_in_turn_and_cut_into_parts(paths: list[str], tmp_path: Path) -> None:
    value = {**COMBINED, "datasets": {"a": paths[0], "b": paths[6]}, "partition_epoch": 2}
    around = {"class": "MapDataset", "dataset": {**COMBINED, "datasets": value["datasets"]}, "map_seq": lambda arrays: arrays}
    for dataset, keys in (opened(value), opened({**around, "partition_epoch": 2})):
        # The datasets have 3 and 6 sequences: 0 to 2, and 3 to 8.
        assert [planned(dataset, keys, epoch) for epoch in (1, 2, 3, 4)] == [[0, 1, 3, 4], [5, 6, 7], [2, 0, 8, 3], [4, 5, 6]]
        with pytest.raises(DataError, match="seq_list_filter_file: expected none with sampling_sizes"):
            planned(dataset, keys, 1, subset=numpy.array([0]))
        dataset.close()
    assert main([str({**value, "data_map": COMBINED["data_map"]}), str(tmp_path / "out.hdf"), "--epoch", "3"]) == 0
    written = open_hdf([tmp_path / "out.hdf"])
    assert written.tags(range(4)) == ["seq-2", "seq-0", "seq-21", "seq-16"]
    same, keys = opened({**value, "sampling_sizes": 1, "partition_epoch": 1})
    assert planned(same, keys, 4) == [0, 6]


def test_malformed_sizes(paths: list[str]) -> None:
    for rule, sizes in (("wrong-type", {"a": 3}), ("out-of-range", {"a": 3, "b": 0}), ("out-of-range", 0)):
        _, found = parse("train", {**COMBINED, "datasets": {"a": paths[0], "b": paths[1]}, "sampling_sizes": sizes}, {})
        assert faults(found) == [f"train.sampling_sizes: {rule}"]
