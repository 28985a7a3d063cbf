"""The sequences of an epoch, as RETURNN itself reads them and as hvdtrain trains on them.

RETURNN is imported in the tests' own process (tests/conftest.py says what that means for TensorFlow).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
from returnn.datasets.basic import init_dataset

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.feed import Feed
from hvdtrain.data.opening import OpeningContext, open_dataset
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.plugins.returnn.dataset import ReturnnDataset
from hvdtrain.plugins.returnn.reading import without_processes

Item = tuple[str, dict[str, Any]]
MAX_SEQS = 3
"""The number of sequences of a batch."""


def by_returnn(options: dict[str, Any], epoch: int) -> list[Item]:
    """An epoch's sequences, as RETURNN itself reads them in this process."""
    return epochs_by_returnn(options, epoch)[epoch]


def epochs_by_returnn(options: dict[str, Any], *epochs: int) -> dict[int, list[Item]]:
    """The sequences of epochs, as RETURNN itself reads them in this process, one epoch after the other."""
    ReturnnDataset({"class": "Task12AXDataset", "num_seqs": 1}).begin_epoch(1)  # sets up what RETURNN wants to find
    if options["class"] == "DistributeFilesDataset":
        options = without_processes(options)  # they would need RETURNN's global config of this process
    dataset = init_dataset(options)
    found: dict[int, list[Item]] = {}
    for epoch in epochs:
        dataset.init_seq_order(epoch)
        items = found[epoch] = []
        while dataset.is_less_than_num_seqs(len(items)):
            number = len(items)
            dataset.load_seqs(number, number + 1)
            items.append((dataset.get_tag(number), {key: dataset.get_data(number, key) for key in dataset.get_data_keys()}))
        dataset.finish_epoch()
    return found


@contextmanager
def opened(value: dict[str, Any], folder: Path | None = None, scans: list[str] | None = None, size: int = 1) -> Iterator[Dataset]:
    """The dataset, as a training opens it. `scans` gets what is read for its lengths."""

    @contextmanager
    def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        if scans is not None:
            scans.append(what)
        yield lambda number: None

    spec, problems = parse("train", value, {})
    assert spec is not None, problems
    dataset = open_dataset(spec, OpeningContext(scanning=Scanning(folder, 0, size, progress)))
    try:
        yield dataset
    finally:
        dataset.close()


def read(
    dataset: Dataset, epoch: int, rank: int = 0, size: int = 1, position: int = 0, order: dict[str, Any] | None = None
) -> list[Item]:
    """What training on a rank sees in an epoch from some batch on, in the dataset's own order or by the keys of one."""
    spec, _ = parse("train", {"class": "Task12AXDataset", "num_seqs": 1, **(order or {})}, {})
    assert spec is not None
    feed = Feed("train", dataset, spec.order, BatchKeys(max_seqs=MAX_SEQS), rank, size)
    items = []
    with feed.read(feed.rank_batches(feed.plan(epoch), position), epoch) as batches:
        for batch in batches:
            assert batch.seq_tags is not None
            for row, tag in enumerate(batch.seq_tags()):
                items.append((tag, {key: padded.values[row, : padded.seq_lens[row]] for key, padded in batch.data.items()}))
    return items


def assert_equal(ours: list[Item], theirs: list[Item]) -> None:
    assert [tag for tag, _ in ours] == [tag for tag, _ in theirs]
    for (tag, one), (_, other) in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, values in other.items():
            assert one[key].reshape(-1).tolist() == numpy.asarray(values).reshape(-1).tolist(), (tag, key)


def hdf(folder: Path, name: str = "a", first: int = 0, count: int = 20) -> str:
    with HDFWriter(folder / f"{name}.hdf", overwrite=True) as writer:
        for number in range(first, first + count):
            frames = numpy.full((1 + number % 5, 2), number, "float32")
            writer.add(f"seq-{number}", {"data": frames, "classes": numpy.arange(number % 3 + 1, dtype="int32")})
    return str(folder / f"{name}.hdf")
