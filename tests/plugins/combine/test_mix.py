"""Epochs that mix datasets: exact counts, an even rate, every sequence equally often, in batches of any plan."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from opened_data import opened, problems_of

from hvdtrain.data.describe import feed_lines
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.epoch import plan
from hvdtrain.data.plan.inputs import PlanInputs
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import DataError
from hvdtrain.plugins.combine.mix import WeightedMix, mixed_datasets, order_mixed
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

SIZES = {"a": 1000, "b": 150, "c": 37}
LENGTHS = numpy.random.default_rng(3).integers(1, 400, sum(SIZES.values())).astype(numpy.int32)


def mix_of(**keys: Any) -> WeightedMix:
    ends = numpy.cumsum(list(SIZES.values())).tolist()
    return WeightedMix("train", dict(zip(SIZES, zip([0, *ends[:-1]], ends, strict=True), strict=True)), **keys)


def counts(mix: WeightedMix, indices: numpy.ndarray) -> list[int]:
    return numpy.bincount(mix.parts_of(indices), minlength=3).tolist()


def test_counts_are_exact_in_every_epoch() -> None:
    mix = mix_of(weights={"a": 0.7, "b": 0.2, "c": 0.1}, stop=1000)
    for ordering in ("random", "default", "laplace:.50", "sorted", "random_blocks:7", "sort_bin_shuffle:9", "reverse"):
        for epoch in (1, 2, 9):
            assert counts(mix, order_mixed(LENGTHS, OrderKeys(seq_ordering=ordering), epoch, mix)) == [700, 200, 100]


def test_the_end_of_an_epoch() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}

    def quotas(mix: WeightedMix) -> list[int]:
        return [part.quota for part in mixed_datasets(mix, LENGTHS, None)]

    assert quotas(mix_of(weights=weights, stop="first")) == [round(37 / 0.2 * 0.5), round(37 / 0.2 * 0.3), 37]
    assert quotas(mix_of(weights=weights)) == [1000, 600, 400]
    assert quotas(mix_of()) == quotas(mix_of(stop="first")) == [1000, 150, 37]  # in proportion to the sizes
    assert quotas(mix_of(temperature=1e9, stop=300)) == [100, 100, 100]
    flatter = quotas(mix_of(temperature=2.0, stop=10_000))
    assert flatter == pytest.approx(10_000 * numpy.sqrt([1000, 150, 37]) / numpy.sqrt([1000, 150, 37]).sum(), abs=1)
    frames = [int(LENGTHS[first:end].sum()) for first, end in mix_of().bounds.values()]
    assert quotas(mix_of(by="frames")) == frames
    with pytest.raises(
        DataError, match=r"train.weights: expected at least one of every dataset in an epoch, got none of c in 20 "
    ):
        quotas(mix_of(weights={"a": 70, "b": 29, "c": 1}, stop=20))
    with pytest.raises(DataError, match="train.datasets.c: expected at least one sequence to mix, got none in use"):
        mixed_datasets(mix_of(), LENGTHS, numpy.arange(1100))


@pytest.mark.parametrize("ordering", ["random", "random_blocks:7", "default"])
@pytest.mark.parametrize("by", ["sequences", "frames"])
def test_the_rate_is_even_throughout_an_epoch(ordering: str, by: Any) -> None:
    """In every tenth of an epoch, and in every batch, up to one sequence of every part at each end."""
    mix = mix_of(weights={"a": 0.7, "b": 0.2, "c": 0.1}, by=by, stop=50_000 if by == "frames" else 1000)
    mixed = order_mixed(LENGTHS, OrderKeys(seq_ordering=ordering), 3, mix)
    costs = numpy.ones(len(mixed)) if by == "sequences" else LENGTHS[mixed]
    largest = 1 if by == "sequences" else int(LENGTHS.max())
    totals = numpy.array([numpy.where(mix.parts_of(mixed) == number, costs, 0).cumsum() for number in range(3)])
    assert totals[:, -1] == pytest.approx([0.7 * costs.sum(), 0.2 * costs.sum(), 0.1 * costs.sum()], abs=2 * largest)
    shares = numpy.array([0.7, 0.2, 0.1])[:, None]
    assert numpy.abs(totals - shares * totals.sum(axis=0)).max() <= 2 * largest


def test_bins_of_laplace_have_the_mix_of_the_epoch_and_are_sorted() -> None:
    mix = mix_of(weights={"a": 0.7, "b": 0.2, "c": 0.1}, stop=1000)
    mixed = order_mixed(LENGTHS, OrderKeys(seq_ordering="laplace:.100"), 1, mix)
    for number, bin in enumerate(mixed.reshape(10, 100)):
        assert counts(mix, bin) == pytest.approx([70, 20, 10], abs=1)
        steps = numpy.diff(LENGTHS[bin])
        assert (steps >= 0).all() if number % 2 == 0 else (steps <= 0).all()


@pytest.mark.parametrize("by", ["sequences", "frames"])
def test_every_sequence_is_used_equally_often_and_passes_differ(by: Any) -> None:
    mix = mix_of(weights={"a": 0.5, "b": 0.3, "c": 0.2}, by=by, stop=60_000 if by == "frames" else 310)
    keys = OrderKeys(seq_ordering="random")
    streams: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for epoch in range(1, 40):
        mixed = order_mixed(LENGTHS, keys, epoch, mix)
        for number, stream in streams.items():
            stream += mixed[mix.parts_of(mixed) == number].tolist()
    for (first, end), stream in zip(mix.bounds.values(), streams.values(), strict=True):
        size = end - first
        passes = [stream[start : start + size] for start in range(0, len(stream) - size, size)]
        assert len(passes) > 2
        assert all(sorted(one) == list(range(first, end)) for one in passes)  # nothing twice before everything once
        assert len({tuple(one) for one in passes}) == len(passes)


def test_seeds_and_orders_that_stay() -> None:
    mix = mix_of(weights={"a": 2, "b": 1, "c": 1}, stop=4 * 37)
    small = slice(*mix.bounds["c"])

    def of_c(keys: OrderKeys, epoch: int) -> list[int]:
        mixed = order_mixed(LENGTHS, keys, epoch, mix)
        return mixed[(mixed >= small.start) & (mixed < small.stop)].tolist()

    random = OrderKeys(seq_ordering="random")
    assert of_c(random, 1) != of_c(random, 2)
    assert of_c(replace(random, random_seed_offset=5), 1) != of_c(random, 1)
    assert of_c(replace(random, fixed_random_seed=5), 1) == of_c(replace(random, fixed_random_seed=5), 2)
    assert of_c(OrderKeys(seq_ordering="random:2"), 1) == of_c(OrderKeys(seq_ordering="random:2"), 2)
    assert of_c(OrderKeys(), 1) == list(range(small.start, small.stop))
    parts = [order_mixed(LENGTHS, replace(random, partition_epoch=4), epoch, mix) for epoch in (1, 2, 3, 4)]
    assert numpy.array_equal(numpy.concatenate(parts), order_mixed(LENGTHS, random, 1, mix))
    for keys in (OrderKeys(seq_ordering="random_sample"), OrderKeys(partition_by="files")):
        with pytest.raises(DataError, match="train.seq_ordering: expected one of random, .* for a MixingDataset, got "):
            order_mixed(LENGTHS, keys, 1, mix)


def test_sequences_that_are_left_out_do_not_change_the_counts() -> None:
    mix = mix_of(weights={"a": 0.7, "b": 0.2, "c": 0.1}, stop=1000)
    made = plan({"data": LENGTHS}, OrderKeys(seq_ordering="random"), BatchKeys(max_seqs=10, max_seq_length=300), 2, mix=mix)
    assert counts(mix, made.order) == [700, 200, 100]
    assert LENGTHS[made.order].max() <= 300
    listed = numpy.arange(0, len(LENGTHS), 2)
    made = plan({"data": LENGTHS}, OrderKeys(seq_ordering="random"), BatchKeys(max_seqs=10), 2, mix=mix, subset=listed)
    assert counts(mix, made.order) == [700, 200, 100]
    assert (made.order % 2 == 0).all()


def test_the_inputs_of_a_plan_include_the_mix() -> None:
    def inputs(mix: WeightedMix | None) -> PlanInputs:
        return PlanInputs({"data": LENGTHS}, OrderKeys(), BatchKeys(max_seqs=9), 1, None, None, None, mix=mix)

    assert inputs(mix_of(stop=500)).checksum() != inputs(mix_of(stop=501)).checksum()
    assert "stop 500" in inputs(mix_of(stop=500)).as_text()["the mix"]
    assert "the mix" not in inputs(None).as_text()


def test_a_million_sequences_are_mixed_in_seconds() -> None:
    mix = WeightedMix("train", {"large": (0, 900_000), "small": (900_000, 900_010)}, {"large": 9, "small": 1})
    lengths = numpy.ones(900_010, dtype=numpy.int32)
    mixed = order_mixed(lengths, OrderKeys(seq_ordering="random"), 1, mix)
    assert numpy.bincount(mix.parts_of(mixed)).tolist() == [900_000, 100_000]
    assert set(Counter(mixed[mix.parts_of(mixed) == 1].tolist()).values()) == {10_000}


def write(path: Path, count: int, name: str) -> str:
    with HDFWriter(path, dims={"classes": 9}) as writer:
        for number in range(count):
            length = number % 5 + 1
            arrays = {"data": numpy.full((length, 2), number, numpy.float32), "classes": numpy.ones(length, numpy.int32)}
            writer.add(f"{name}-{number}", arrays)
    return str(path)


def test_a_mix_is_opened_described_and_read(tmp_path: Path) -> None:
    files = {name: write(tmp_path / f"{name}.hdf", size, name) for name, size in {"a": 20, "b": 5}.items()}
    mixing = {"class": "MixingDataset", "datasets": files, "weights": {"a": 0.5, "b": 0.5}}
    for value in (mixing, {"class": "MapDataset", "dataset": mixing, "map_seq": lambda arrays: arrays}):
        dataset = opened(value)
        feed = Feed("train", dataset, OrderKeys(seq_ordering="random"), BatchKeys(max_seqs=4), 0, 1)
        line = "train: sequences in a full epoch: 40: 20 of a (50.0%, 1 times all), 20 of b (50.0%, 4 times all)"
        assert (4, line) in feed_lines(feed)
        made = feed.plan(1)
        with feed.read(feed.rank_batches(made), 1) as batches:
            for batch in batches:
                assert batch.parts is not None
                assert batch.seq_tags is not None
                assert batch.parts.names == ("a", "b")
                names = [batch.parts.names[number] for number in batch.parts.numbers.tolist()]
                assert names == [tag[0] for tag in batch.seq_tags()]
                assert sorted(names) == ["a", "a", "b", "b"]
        dataset.close()
    combined = {"class": "CombinedDataset", "datasets": files, "data_map": {("a", "data"): "data", ("b", "data"): "data"}}
    for wrong, why in (
        (
            {"class": "ConcatDataset", "datasets": [mixing]},
            "expected a MixingDataset around other datasets, or inside a MapDataset",
        ),
        (
            {"class": "MixingDataset", "datasets": {"a": combined | {"sampling_sizes": 3}}},
            "expected a dataset without sampling_sizes",
        ),
    ):
        with pytest.raises(DataError, match=why):
            opened(wrong)


def test_wrong_keys_of_a_mix() -> None:
    for rule, options in (
        ("datasets: missing", {"datasets": {}}),
        ("datasets: wrong-format", {"datasets": {"a.b": "x.hdf"}}),
        ("weights: wrong-type", {"datasets": {"a": "x.hdf"}, "weights": {"b": 1}}),
        ("weights: out-of-range", {"datasets": {"a": "x.hdf"}, "weights": {"a": 0}}),
        ("stop: wrong-type", {"datasets": {"a": "x.hdf"}, "stop": "never"}),
        ("stop: out-of-range", {"datasets": {"a": "x.hdf"}, "stop": 0}),
    ):
        assert problems_of({"class": "MixingDataset", **options}) == [f"train.{rule}"]
