"""What was read stays in memory, within a budget."""

from pathlib import Path

import h5py
import numpy
import pytest

from hvdtrain.data.cache import PER_ARRAY, Budget, CachedDataset, with_cache
from hvdtrain.data.hdf import HDFDataset, open_hdf
from hvdtrain.data.sizes import parse_sizes
from hvdtrain.data.writer import HDFWriter


@pytest.fixture
def compressed(tmp_path: Path) -> HDFDataset:
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


def test_a_cache_gives_the_same_and_reads_once(compressed: HDFDataset) -> None:
    reference = [compressed.sequence(index) for index in range(20)]
    cached = CachedDataset(compressed, Budget(None))
    for _ in range(2):
        for index in numpy.random.default_rng(1).permutation(20).tolist():
            assert all(numpy.array_equal(values, reference[index][key]) for key, values in cached.sequence(index).items())
    assert cached.num_kept == 20
    compressed.close()  # nothing is read any more
    assert cached.sequence(7)["data"][0, 0] == 7


def test_the_budget_is_kept_in_true_bytes_without_what_is_mapped(compressed: HDFDataset) -> None:
    assert compressed.mapped == {"classes"}
    one = 10 * 4 * 4 + PER_ARRAY
    budget = Budget(3 * one + 10)
    cached = CachedDataset(compressed, budget)
    for index in range(20):
        cached.sequence(index)
    assert cached.num_kept == 3
    assert budget.used == 3 * one
    assert cached.sequence(19)["data"][0, 0] == 19


def test_changing_what_was_given_changes_nothing_in_the_cache(compressed: HDFDataset) -> None:
    cached = CachedDataset(compressed, Budget(None))
    del cached.sequence(1)["data"]
    assert "data" in cached.sequence(1)


def test_mapped_files_and_empty_budgets_need_no_cache(compressed: HDFDataset, tmp_path: Path) -> None:
    assert with_cache(compressed, Budget(0)) is compressed
    assert isinstance(with_cache(compressed, Budget(100)), CachedDataset)
    with HDFWriter(tmp_path / "mapped.hdf") as writer:
        writer.add("a", {"data": numpy.zeros((2, 2), numpy.float32)})
    mapped = open_hdf([tmp_path / "mapped.hdf"])
    assert with_cache(mapped, Budget(None)) is mapped
