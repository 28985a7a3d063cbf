"""Sequences cut into chunks, held to the two rules of RETURNN written down as loops."""

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from launching import faults
from opened_data import Numbers

from hvdtrain.config.check import build
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.epoch import plan
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import DataError
from hvdtrain.plugins.chunks.fixed import FixedChunks, make_chunks
from hvdtrain.plugins.chunks.keys import ChunkKeys, ChunkSize, Context, keys_of, parse, parse_context

LENGTHS = numpy.array([5, 3, 9, 1, 7, 2, 8, 4, 6, 10, 5, 3], dtype=numpy.int32)


def spans(made: FixedChunks, name: str) -> list[list[tuple[int, int]]]:
    """Begin and end of all chunks, by sequence."""
    result: list[list[tuple[int, int]]] = [[] for _ in made.first[1:]]
    for index, owner in enumerate(made.sequences.tolist()):
        start = int(made.numbers[index]) * made.steps.get(name, 0)
        result[owner].append((start, start + int(made.lengths[name][index])))
    return result


def with_tensorflow(length: int, size: int, step: int, least: int) -> Iterator[tuple[int, int]]:
    start = 0
    while length > start:
        yield start, min(start + size, length)
        start += step
        if length - start <= least:
            break


def with_pytorch(length: int, size: int, step: int, least: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, step):
        end = min(start + size, length)
        if end - start >= least:
            yield start, end


RULES = {"keep": with_tensorflow, "drop_short": with_pytorch}


@pytest.mark.parametrize("tail", RULES)
@pytest.mark.parametrize("seed", range(10))
def test_chunks_are_those_of_the_loops(tail: str, seed: int) -> None:
    generator = numpy.random.default_rng(seed)
    lengths = generator.integers(0, 60, 80).astype(numpy.int32)
    size = int(generator.integers(1, 20))
    step = int(generator.integers(1, 25))
    least = int(generator.integers(0, size + 1))
    made = make_chunks({"data": lengths}, ChunkKeys(chunking=(size, step), min_chunk_size=least, chunking_tail=tail))
    assert spans(made, "data") == [list(RULES[tail](length, size, step, least)) for length in lengths.tolist()]
    assert made.first[-1] == len(made.sequences) == len(made.lengths["data"])
    assert made.lengths["data"].dtype == numpy.int32


def test_the_two_rules_differ_in_short_tails_only() -> None:
    lengths = {"data": numpy.array([10, 3, 13, 12])}
    keep = make_chunks(lengths, ChunkKeys(chunking="5:5", min_chunk_size=3))
    assert spans(keep, "data") == [[(0, 5), (5, 10)], [(0, 3)], [(0, 5), (5, 10)], [(0, 5), (5, 10)]]
    drop = make_chunks(lengths, ChunkKeys(chunking="5:5", min_chunk_size=3, chunking_tail="drop_short"))
    assert spans(drop, "data") == [[(0, 5), (5, 10)], [(0, 3)], [(0, 5), (5, 10), (10, 13)], [(0, 5), (5, 10)]]


def test_data_keys_that_are_not_named_stay_whole() -> None:
    made = make_chunks({"data": numpy.array([6, 3]), "text": numpy.array([4, 1])}, ChunkKeys(chunking={"data": 2}))
    assert made.sequences.tolist() == [0, 0, 0, 1, 1]
    assert made.lengths["data"].tolist() == [2, 2, 2, 2, 1]
    assert made.lengths["text"].tolist() == [4, 4, 4, 1, 1]


def test_data_keys_of_another_rate_have_sizes_of_their_own() -> None:
    keys = ChunkKeys(chunking=({"data": 4, "classes": 2}, {"data": 2, "classes": 1}))
    made = make_chunks({"data": numpy.array([8, 3]), "classes": numpy.array([4, 2])}, keys)
    assert spans(made, "data")[0] == [(0, 4), (2, 6), (4, 8), (6, 8)]
    assert spans(made, "classes")[0] == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_a_single_frame_beside_longer_data_is_repeated_for_each_chunk() -> None:
    for tail in RULES:
        made = make_chunks(
            {"data": numpy.array([6, 1]), "speaker": numpy.array([1, 1])}, ChunkKeys(chunking=2, chunking_tail=tail)
        )
        assert made.sequences.tolist() == [0, 0, 0, 1]
        assert made.lengths["speaker"].tolist() == [1, 1, 1, 1]


def test_data_keys_that_cannot_be_cut_alike_are_an_error() -> None:
    lengths = {"data": numpy.array([4, 9]), "classes": numpy.array([4, 5])}
    for tail in RULES:
        message = (
            "chunking: expected data keys .* got 5 of the 9 frames of 'data' and 3 of the 5 frames of 'classes' in sequence 1"
        )
        with pytest.raises(DataError, match=message):
            make_chunks(lengths, ChunkKeys(chunking=2, chunking_tail=tail))
    close = {"data": numpy.array([10]), "classes": numpy.array([9])}
    assert make_chunks(close, ChunkKeys(chunking=2, chunking_tail="drop_short")).lengths["classes"].tolist() == [2, 2, 2, 2, 1]
    with pytest.raises(DataError, match="the same length if they have the same step"):
        make_chunks(close, ChunkKeys(chunking=2))


def test_a_plan_over_chunks_follows_the_order_of_the_sequences() -> None:
    chunks = make_chunks({"data": LENGTHS}, ChunkKeys(chunking="4:2"))
    made = plan({"data": LENGTHS}, OrderKeys(seq_ordering="random", partition_epoch=3), BatchKeys(max_seqs=2), 1, chunks=chunks)
    owners = chunks.sequences[made.order].tolist()
    assert list(dict.fromkeys(owners)) == [2, 3, 4, 10]
    assert owners == [2] * 5 + [3] + [4] * 4 + [10] * 3
    assert chunks.numbers[made.order].tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 0, 1, 2]
    assert numpy.diff(made.bounds).tolist() == [2, 2, 2, 2, 2, 2, 1]


def feed(dataset: Any, order: OrderKeys, batch: BatchKeys, keys: ChunkKeys, rank: int = 0, size: int = 1) -> Feed:
    return Feed("train", dataset, order, batch, rank, size, chunks=make_chunks(dataset.lengths, keys))


@pytest.mark.parametrize("size", [1, 3])
def test_batches_hold_the_frames_of_the_chunks(size: int) -> None:
    dataset = Numbers({"data": LENGTHS, "speaker": numpy.ones(12, dtype=numpy.int32)})
    seen = []
    for rank in range(size):
        one = feed(dataset, OrderKeys(seq_ordering="random"), BatchKeys(max_seqs=3), ChunkKeys(chunking="4:3"), rank, size)
        made = one.plan(2)
        assert one.sequences_among(made.order) == 12
        with one.read(one.rank_batches(made), 2) as batches:
            for batch in batches:
                for row, owner in enumerate(batch.indices.tolist()):
                    length = int(batch.data["data"].seq_lens[row])
                    assert batch.data["data"].values[row, length:].tolist() == [0] * (batch.data["data"].values.shape[1] - length)
                    assert batch.data["speaker"].values[row].tolist() == [100 * owner]
                    seen.append(batch.data["data"].values[row, :length].tolist())
    expected = [
        [100 * index + frame for frame in range(*span)]
        for index, length in enumerate(LENGTHS.tolist())
        for span in with_tensorflow(length, 4, 3, 0)
    ]
    assert sorted(seen) == sorted(expected)


def test_chunks_in_a_row_read_their_sequence_once() -> None:
    dataset = Numbers({"data": LENGTHS})
    one = feed(dataset, OrderKeys(), BatchKeys(max_seqs=4), ChunkKeys(chunking=2))
    with one.read(one.rank_batches(one.plan(1)), 1) as batches:
        list(batches)
    assert dataset.reads == list(range(12))


@pytest.mark.parametrize("chunking", [None, "4:3"])
def test_context_is_of_the_sequence_with_zeros_beyond_its_ends(chunking: str | None) -> None:
    """Sequence by sequence, or chunk by chunk; other data keys have none. An even number has one more frame after than before."""
    dataset = Numbers({"data": LENGTHS, "classes": LENGTHS})
    one = feed(dataset, OrderKeys(), BatchKeys(max_seqs=3), ChunkKeys(chunking=chunking, context_window=4))
    seen = []
    with one.read(one.rank_batches(one.plan(1)), 1) as batches:
        for batch in batches:
            sizes = {name: column.seq_lens.tolist() for name, column in batch.data.items()}
            assert sizes["data"] == [size + 3 for size in sizes["classes"]]
            for row, size in enumerate(sizes["data"]):
                assert (
                    batch.data["data"].values[row, 1 : size - 2].tolist()
                    == batch.data["classes"].values[row, : size - 3].tolist()
                )
                seen.append(batch.data["data"].values[row, :size].tolist())
    expected = []
    for index, length in enumerate(LENGTHS.tolist()):
        frames = [0, *range(100 * index, 100 * index + length), 0, 0]
        parts = [(0, length)] if chunking is None else with_tensorflow(length, 4, 3, 0)
        expected += [frames[start : stop + 3] for start, stop in parts]
    assert seen == expected


def test_sequences_without_a_chunk_are_left_out_and_repeated_ones_counted() -> None:
    dataset = Numbers({"data": LENGTHS})
    keys = ChunkKeys(chunking=4, min_chunk_size=4, chunking_tail="drop_short")
    one = feed(dataset, OrderKeys(repeat_epoch=2), BatchKeys(max_seqs=4), keys)
    assert one.sequences_among(one.plan(1).order) == 2 * int((LENGTHS >= 4).sum())
    dataset.lengths = {"data": numpy.array([3, 2])}
    one = feed(dataset, OrderKeys(), BatchKeys(max_seqs=4), keys)
    with pytest.raises(DataError, match="epoch 1: expected at least one of its 2 sequences to be left"):
        one.plan(1)


WAYS: dict[str, list[tuple[object, ChunkSize | Context | None]]] = {
    "chunking": [
        (None, None),
        (0, None),
        ("0", None),
        ("0:0", None),
        (50, ChunkSize(50, 50)),
        ("50", ChunkSize(50, 50)),
        ("50:25", ChunkSize(50, 25)),
        ("50:0", ChunkSize(50, 50)),
        ((50, 25), ChunkSize(50, 25)),
        ([50, 25], ChunkSize(50, 25)),
        ((50, None), ChunkSize(50, 50)),
        ({"data": 4}, ChunkSize({"data": 4}, {"data": 4})),
        (({"data": 4}, {"data": 2}), ChunkSize({"data": 4}, {"data": 2})),
    ],
    "context_window": [
        (None, None),
        (1, None),
        ({"data": 1}, None),
        (4, Context({"data": 1}, {"data": 2})),
        ({"data": 3, "x": 1}, Context({"data": 1, "x": 0}, {"data": 1, "x": 0})),
        (({"data": 5}, {}), Context({"data": 5}, {})),
    ],
}
MEANINGLESS: dict[str, list[object]] = {
    "chunking": [
        *("50,25", "a", "50:25:5", -1, (50, -1), (1, 2, 3), ({"data": 4}, 2), ({"data": 4}, {"classes": 2}), {"data": 0}, ())
    ],
    "context_window": [0, -3, True, "a", {"data": 0}, ({"data": -1}, {}), (2, 2), ({},), {"data": 2.5}],
}


@pytest.mark.parametrize("key", WAYS)
def test_ways_to_write_a_key(key: str) -> None:
    for value, expected in WAYS[key]:
        section, problems = build(ChunkKeys, {key: value}, "", {})
        assert problems == []
        assert (parse(section.chunking) if key == "chunking" else parse_context(section.context_window)) == expected, value
        assert (make_chunks({"data": LENGTHS}, section) is None) == (expected is None)


@pytest.mark.parametrize("key", MEANINGLESS)
def test_values_that_mean_nothing(key: str) -> None:
    for value in MEANINGLESS[key]:
        section, problems = build(ChunkKeys, {key: value}, "", {key: "x.py"})
        assert section is None
        assert [problem.key for problem in problems] == [key], value


def test_what_stands_in_each_others_way() -> None:
    (problem,) = faults(ChunkKeys(chunking=4, min_chunk_size=5, chunking_tail="drop_short").problems())
    assert problem == "min_chunk_size: conflict"
    by_key = ChunkKeys(chunking={"data": 4, "x": 9}, min_chunk_size={"data": 5, "x": 5}, chunking_tail="drop_short")
    assert len(by_key.problems()) == 1
    assert faults(ChunkKeys(chunking=4, min_chunk_size=5).problems()) == []
    assert faults(ChunkKeys(min_chunk_size={"data": -1}).problems()) == ["min_chunk_size: out-of-range"]
    assert keys_of(by_key) == ["data", "x"]
    assert keys_of(ChunkKeys(chunking=4)) == []
