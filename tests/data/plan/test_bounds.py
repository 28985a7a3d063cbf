"""Where batches begin, held to RETURNN's rules written down plainly."""

import time

import numpy
import pytest

from hvdtrain.data.plan.batch_keys import Limits
from hvdtrain.data.plan.bounds import bounds, count_too_long

LENGTHS = numpy.array([5, 3, 9, 1, 7, 2, 8, 4, 6, 10, 5, 3], dtype=numpy.int32)


def batches(lengths: dict[str, numpy.ndarray], indices: list[int], limits: Limits) -> list[list[int]]:
    edges = bounds(lengths, numpy.array(indices, dtype=numpy.int64), limits)
    assert (edges.dtype, edges[0], edges[-1]) == (numpy.int64, 0, len(indices))
    return [indices[start:end] for start, end in zip(edges.tolist(), edges.tolist()[1:], strict=False)]


def by_key(limit: object, key: str) -> float:
    value = limit.get(key) if isinstance(limit, dict) else limit
    return float("inf") if value is None else value


def greedy(lengths: dict[str, numpy.ndarray], indices: list[int], limits: Limits) -> list[list[int]]:
    """The rules, word for word: close a batch that is not empty before the sequence with which it would be too large."""
    result: list[list[int]] = []
    for index in indices:
        with_it = [*(result[-1] if result else []), index]
        too_large = limits.max_seqs is not None and len(with_it) > limits.max_seqs
        for key, column in lengths.items():
            frames = [int(column[i]) for i in with_it]
            padded = max(frames) * len(frames)
            too_large |= padded > by_key(limits.batch_size, key)
            too_large |= sum(frames) > by_key(limits.packed_batch_size, key)
            too_large |= padded - sum(frames) > by_key(limits.max_pad_size, key)
        if too_large or not result:
            result.append([index])
        else:
            result[-1] = with_it
    return result


def test_packed_batches_are_those_of_returnn() -> None:
    expected = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]
    assert batches({"data": LENGTHS}, list(range(12)), Limits(packed_batch_size=20)) == expected
    assert batches({"data": LENGTHS}, list(range(12)), Limits(packed_batch_size={"data": 20})) == expected


def test_padding_is_limited() -> None:
    # 5 3: 2; with 9: 10, closed. 9 1: 8, closed. 1 7: 6, closed. 7 2: 5 ...
    expected = [[0, 1], [2], [3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert batches({"data": LENGTHS}, list(range(12)), Limits(max_pad_size=5)) == expected
    assert batches({"data": LENGTHS}, list(range(12)), Limits(max_pad_size=0)) == [[i] for i in range(12)]
    assert batches({"data": LENGTHS}, list(range(12)), Limits(max_pad_size=1000)) == [list(range(12))]


def random_limit(generator: numpy.random.Generator, keys: list[str], most: int) -> object:
    kind = generator.integers(4)
    if kind == 0:
        return None
    if kind == 1:
        return int(generator.integers(1, most))
    return {key: int(generator.integers(1, most)) for key in keys if kind == 2 or generator.integers(2)}


@pytest.mark.parametrize("seed", range(40))
def test_batches_of_random_lengths_are_those_of_the_plain_rules(seed: int) -> None:
    generator = numpy.random.default_rng(seed)
    size = int(generator.integers(1, 150)) if seed else 0
    keys = ["data", "classes", "aux"][: int(generator.integers(1, 4))]
    lengths = {key: generator.integers(0, 40, size).astype(numpy.int32) for key in keys}
    indices = generator.integers(0, size, size).tolist() if size else []
    for number in range(8):
        others = {
            "batch_size": random_limit(generator, keys, 300),
            "packed_batch_size": random_limit(generator, keys, 300),
            "max_pad_size": random_limit(generator, keys, 60),
        }
        limits = Limits(max_seqs=None if number % 2 else int(generator.integers(1, 12)), **(others if number else {}))
        assert batches(lengths, indices, limits) == greedy(lengths, indices, limits), limits


def test_sequences_that_are_too_long_by_themselves_are_counted() -> None:
    lengths = {"data": LENGTHS, "classes": numpy.roll(LENGTHS, 1)}
    assert count_too_long(lengths, Limits(batch_size=8)) == 4  # 9 and 10, in either key
    assert count_too_long(lengths, Limits(batch_size={"data": 8})) == 2
    assert count_too_long(lengths, Limits(batch_size={"data": 9}, packed_batch_size={"classes": 9})) == 2
    assert count_too_long(lengths, Limits(max_seqs=1)) == 0


def test_many_sequences_take_seconds() -> None:
    """In processor time, several times what it takes, for machines that do other things."""
    generator = numpy.random.default_rng(0)
    lengths = {key: generator.integers(10, 2000, 250_000).astype(numpy.int32) for key in ("data", "classes")}
    indices = generator.permutation(250_000)
    began = time.process_time()
    bounds(lengths, indices, Limits(batch_size={"data": 20000, "classes": 10000}, packed_batch_size=15000, max_pad_size=5000))
    assert time.process_time() - began < 2.5
