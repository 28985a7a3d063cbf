"""Every order compared with that of the installed RETURNN: random numbers of sequences, files, bins, parts, epochs and seeds."""

import random
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy
import pytest
from returnn.datasets.hdf import HDFDataset

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.feed import Feed
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.opening import open_dataset
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order import order
from hvdtrain.data.plan.order_keys import METHODS, WITH_BINS, OrderKeys
from hvdtrain.errors import DataError

SIZES = [1, 2, 3, 5, 12, 97, 1000, 4999, 30_011, 70_000]
"""Numbers of sequences: the first and the last, and for each of the others one that is drawn between half of it and this.

70,000 indices need more than 16 bits.
"""

CASES = 200
"""Orders compared for each number of sequences; fewer where there are many."""

OURS = ("random_blocks",)
"""Methods that RETURNN does not have."""


def write(path: Path, lengths: numpy.ndarray, first: int) -> str:
    """A file of sequences of these lengths, as RETURNN's SimpleHDFWriter lays it out, whose tags are numbered from `first`."""
    with h5py.File(path, "w") as file:
        file["inputs"] = numpy.zeros(int(lengths.sum()), dtype=numpy.int32)
        file.attrs["inputPattSize"] = file.attrs["numLabels"] = 1
        file["seqLengths"] = numpy.stack([lengths, lengths], axis=1).astype(numpy.int32)
        file["seqTags"] = numpy.array([f"seq-{first + number}".encode() for number in range(len(lengths))])
    return str(path)


def some_lengths(chance: random.Random, size: int) -> numpy.ndarray:
    """With many ties, with few, or with sequences longer than 16 bits can count."""
    longest = chance.choice([1, 3, 30, 30, 200 if size < 20_000 else 40])
    lengths = numpy.random.default_rng(size).integers(0, longest + 1, size)
    lengths[chance.randrange(size)] = chance.choice([1, 70_000 if size < 1000 else 1])
    return lengths


def some_files(folder: Path, chance: random.Random, size: int, cuts: int | None = None) -> list[str]:
    """Files of `size` sequences together, cut at random places: by default at up to three of them."""
    lengths = some_lengths(chance, size)
    bounds = sorted({0, size, *(chance.randrange(size) for _ in range(chance.randrange(4) if cuts is None else cuts))})
    return [
        write(folder / f"{size}-{start}.hdf", lengths[start:stop], start) for start, stop in zip(bounds, bounds[1:], strict=False)
    ]


def some_order(chance: random.Random, method: str, size: int) -> str:
    """A method with numbers, which may be larger than there are sequences."""
    number = chance.choice([1, 2, 3, 7, chance.randint(1, size), chance.randint(1, 2 * size)])
    number = min(number, 3000)  # RETURNN takes its time with bins
    keep = chance.choice([1, 1, 2, 3])
    if method == "default_every_n":
        return f"{method}:{number}"
    if method in WITH_BINS:
        return chance.choice(
            [method, f"{method}:{number}", f"{method}:.{number}", f"{method}:{number}:{keep}", f"{method}:.{number}:{keep}"]
        )
    return chance.choice([method, f"{method}:{keep}"]) if method in ("random", "random_sample") else method


def some_keys(chance: random.Random, method: str, size: int) -> OrderKeys:
    parts = chance.choice([1, 1, 2, 3, 10, chance.randint(1, size)])
    return OrderKeys(
        seq_ordering=some_order(chance, method, size),
        partition_epoch=parts,
        repeat_epoch=chance.choice([1, 1, 3]) if parts == 1 else 1,  # RETURNN allows one of them
        fixed_random_seed=chance.choice([None, None, None, 0, 42]),
        random_seed_offset=chance.choice([0, 0, 16127, 5]),
    )


def by_returnn(dataset: HDFDataset, keys: OrderKeys, epoch: int) -> list[int]:
    dataset.seq_ordering, dataset.fixed_random_seed = keys.seq_ordering, keys.fixed_random_seed
    dataset.partition_epoch, dataset.repeat_epoch = keys.partition_epoch, keys.repeat_epoch
    dataset._random_seed_offset = keys.random_seed_offset  # the constructor's argument, which has a property in front of it
    get_length = lambda index: dataset._get_seq_length_by_real_idx(index)[0]  # noqa: E731  # as init_seq_order does it
    ordered = dataset.get_seq_order_for_epoch(epoch, dataset.get_total_num_seqs(), get_length)
    return numpy.asarray(ordered).astype(numpy.int64).tolist()  # of floats, where a bin is empty


@pytest.fixture(params=[*SIZES[:-1], pytest.param(SIZES[-1], marks=pytest.mark.slow)])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[random.Random, int, HDFDataset, Dataset]]:
    """RETURNN's dataset and ours, of the same files. RETURNN's cache is off: its threads lose sequences now and then."""
    chance = random.Random(request.param)
    size = request.param if request.param in (1, max(SIZES)) else chance.randint(request.param // 2, request.param)
    files = some_files(tmp_path, chance, size)
    theirs = HDFDataset(files=files, cache_byte_size=0)
    theirs.initialize()
    ours = open_hdf(files)
    yield chance, size, theirs, ours
    ours.close()


def test_every_order_is_that_of_returnn(both: tuple[random.Random, int, HDFDataset, Dataset]) -> None:
    chance, size, theirs, ours = both
    methods = [method for method in METHODS if method not in OURS]
    compared = 0
    for number in range(max(len(methods), min(CASES, 300_000 // size))):
        method = methods[number % len(methods)]
        keys, epoch = some_keys(chance, method, size), chance.choice([1, 2, 3, chance.randint(1, 10_000)])
        expected = by_returnn(theirs, keys, epoch)
        every = int(keys.seq_ordering.split(":")[1]) if method == "default_every_n" else 1
        left = size // every * every
        if keys.partition_epoch <= left:
            assert order(ours.lengths["data"], keys, epoch).tolist() == expected, (size, keys, epoch)
            compared += 1
        else:  # RETURNN makes epochs of no sequence
            with pytest.raises(DataError, match="seq_ordering: expected|partition_epoch: expected"):
                order(ours.lengths["data"], keys, epoch)
    assert compared > len(methods) / 2


@pytest.mark.parametrize("method", [method for method in METHODS if method not in OURS])
def test_the_sequences_of_an_epoch_are_those_of_returnn(tmp_path: Path, method: str) -> None:
    """From the dict of a config to the tags."""
    text = f"{method}:3" if method == "default_every_n" or method in WITH_BINS else method
    files = some_files(tmp_path, random.Random(method), 50, cuts=3)
    options = {"class": "HDFDataset", "files": files, "seq_ordering": text, "partition_epoch": 4}
    theirs = HDFDataset(cache_byte_size=0, **{name: value for name, value in options.items() if name != "class"})
    theirs.initialize()
    spec, problems = parse("train", options, {})
    assert spec is not None, problems
    ours = open_dataset(spec)
    feed = Feed("train", ours, spec.order, BatchKeys(max_seqs=5), 0, 1)
    for epoch in range(1, 9):
        theirs.init_seq_order(epoch)
        tags = [theirs.get_tag(number) for number in range(theirs.num_seqs)]
        assert ours.tags(feed.plan(epoch).order.tolist()) == tags
    ours.close()
