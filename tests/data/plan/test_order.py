"""The order of an epoch's sequences, held to what RETURNN does; test_order_returnn.py asks RETURNN itself."""

import numpy
import pytest
import torch
from launching import faults

from hvdtrain.config.check import build
from hvdtrain.data.plan.order import BLOCKS_TOGETHER, order
from hvdtrain.data.plan.order_keys import METHODS, Method, OrderKeys, parse
from hvdtrain.errors import DataError

LENGTHS = numpy.array([5, 3, 9, 1, 7, 2, 8, 4, 6, 10, 5, 3], dtype=numpy.int32)


def ordered(method: str, epoch: int = 1, lengths: numpy.ndarray = LENGTHS, **keys: int) -> list[int]:
    return order(lengths, OrderKeys(seq_ordering=method, **keys), epoch).tolist()


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split()]


# What RETURNN's datasets answer for LENGTHS.
BY_RETURNN = [
    ("default", 1, {}, "0 1 2 3 4 5 6 7 8 9 10 11"),
    ("reverse", 1, {}, "11 10 9 8 7 6 5 4 3 2 1 0"),
    ("random", 1, {}, "2 3 4 10 1 6 0 7 11 9 8 5"),
    ("random", 2, {}, "9 5 4 7 1 10 0 3 2 6 11 8"),
    ("random", 3, {}, "5 4 1 2 11 6 7 0 3 9 8 10"),
    ("random", 1, {"random_seed_offset": 16127}, "8 0 1 4 3 9 7 5 10 2 6 11"),
    ("random", 1, {"fixed_random_seed": 42}, "10 9 0 8 5 2 1 11 4 7 3 6"),
    ("random_sample", 1, {}, "5 11 8 9 11 5 0 0 1 7 6 9"),
    ("sorted", 1, {}, "3 5 1 11 7 0 10 8 4 6 2 9"),
    ("sorted_reverse", 1, {}, "9 2 6 4 8 0 10 7 1 11 5 3"),
    ("default_every_n:3", 1, {}, "0 4 8 1 5 9 2 6 10 3 7 11"),
    ("laplace", 1, {}, "3 1 10 4 6 2 9 8 0 7 11 5"),
    ("laplace:3", 1, {}, "3 10 4 2 6 0 7 1 5 11 8 9"),
    ("laplace:.4", 1, {}, "3 10 4 2 6 0 7 1 5 11 8 9"),
    ("sort_bin_shuffle", 1, {}, "0 8 4 6 2 9 3 5 1 11 7 10"),
    ("sort_bin_shuffle:3", 1, {}, "3 5 1 11 7 10 0 8 4 6 2 9"),
    ("sort_bin_shuffle_x2:3", 1, {}, "5 11 3 1 8 7 0 10 6 2 4 9"),
    ("random", 1, {"partition_epoch": 3}, "2 3 4 10"),
    ("random", 2, {"partition_epoch": 3}, "1 6 0 7"),
    ("random", 3, {"partition_epoch": 3}, "11 9 8 5"),
    ("random", 4, {"partition_epoch": 3}, "9 5 4 7"),
]


@pytest.mark.parametrize(("method", "epoch", "keys", "expected"), BY_RETURNN)
def test_orders_are_those_of_returnn(method: str, epoch: int, keys: dict[str, int], expected: str) -> None:
    assert ordered(method, epoch, **keys) == numbers(expected)


@pytest.mark.parametrize("method", METHODS)
def test_orders_are_int64_and_may_be_of_no_sequences(method: str) -> None:
    text = f"{method}:1" if method in ("default_every_n", "random_blocks") else method
    assert order(LENGTHS, OrderKeys(seq_ordering=text), 1).dtype == numpy.int64
    assert ordered(text, 1, LENGTHS[:0]) == []


def test_repeat_epoch_goes_through_the_part_again() -> None:
    assert ordered("random", 1, partition_epoch=3, repeat_epoch=2) == numbers("2 3 4 10 2 3 4 10")
    assert ordered("random", 4, partition_epoch=3, repeat_epoch=3) == 3 * numbers("9 5 4 7")


def test_more_parts_than_sequences_is_an_error() -> None:
    assert ordered("default", 12, partition_epoch=12) == [11]
    with pytest.raises(DataError, match="partition_epoch: expected at most 12, the number of sequences, got 13"):
        ordered("default", 1, partition_epoch=13)


def test_orders_depend_on_nothing_but_the_arguments() -> None:
    numpy.random.seed(1)
    first = ordered("sort_bin_shuffle_x2:3", 5)
    numpy.random.seed(2)
    assert ordered("sort_bin_shuffle_x2:3", 5) == first


def test_default_every_n_drops_the_remainder_as_returnn_does_but_never_everything() -> None:
    assert ordered("default_every_n:5") == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    with pytest.raises(
        DataError, match="seq_ordering: expected default_every_n:N with N up to 3, the number of sequences, got .*:5"
    ):
        ordered("default_every_n:5", 1, LENGTHS[:3])


def test_numbers_of_a_method_are_parsed() -> None:
    assert parse("laplace") == Method("laplace")
    assert parse("laplace:5") == Method("laplace", bins=5)
    assert parse("laplace:.5:3") == Method("laplace", per_bin=5, keep=3)
    assert parse("random:3") == Method("random", keep=3)
    assert parse("default_every_n:4") == Method("default_every_n", bins=4)


MALFORMED = (
    "unknown|randomly|random:0|random:x|random:1:2|laplace:|laplace:0|laplace:.0|laplace:-3|laplace:1:2:3|default:3|sorted:2"
)


@pytest.mark.parametrize(
    "method",
    [
        *MALFORMED.split("|"),
        "default_every_n",
        "random_blocks",
        "random_blocks:0",
        "random_blocks:2:2:2",
        "Random",
        "",
        " random",
    ],
)
def test_methods_that_do_not_exist_are_problems_of_the_config(method: str) -> None:
    section, problems = build(OrderKeys, {"seq_ordering": method}, "train.", {})
    assert section is None
    assert faults(problems) == ["train.seq_ordering: wrong-format"]
    assert repr(method) in problems[0].got


def test_seeds_that_numpy_has_no_generator_for_are_problems_of_the_config() -> None:
    values = {"fixed_random_seed": -1, "random_seed_offset": -5, "partition_epoch": 0, "repeat_epoch": 0}
    _, problems = build(OrderKeys, values, "train.", {})
    assert sorted(faults(problems)) == sorted(f"train.{name}: out-of-range" for name in values)


# What RETURNN does not have


def test_random_blocks_is_a_pure_function_that_is_held_to_this_order() -> None:
    assert ordered("random_blocks:2") == numbers("4 11 2 6 8 3 10 7 9 1 0 5")
    assert ordered("random_blocks:2", 2) == numbers("10 0 2 7 6 9 8 11 5 3 4 1")
    assert ordered("random_blocks:2:2", 2) == ordered("random_blocks:2")
    assert ordered("random_blocks:2", 4, fixed_random_seed=1) == ordered("random_blocks:2")


@pytest.mark.parametrize("size", [1, 5, 6, 200, 201, 1000])
@pytest.mark.parametrize("per_block", [1, 3, 10])
def test_random_blocks_shuffles_within_a_few_blocks_at_a_time(size: int, per_block: int) -> None:
    lengths = numpy.zeros(size, dtype=numpy.int32)
    result = ordered(f"random_blocks:{per_block}", 3, lengths)
    assert sorted(result) == list(range(size))
    num_blocks = -(-size // per_block)
    generator = numpy.random.RandomState(3)
    blocks = generator.permutation(num_blocks).tolist()
    rest = result
    for first in range(0, num_blocks, BLOCKS_TOGETHER):
        buffer = [
            index
            for block in blocks[first : first + BLOCKS_TOGETHER]
            for index in range(block * per_block, min(size, (block + 1) * per_block))
        ]
        assert sorted(rest[: len(buffer)]) == sorted(buffer)
        if len(buffer) > 30:
            assert rest[: len(buffer)] != buffer  # shuffled, too
        rest = rest[len(buffer) :]
    assert rest == []


def test_a_function_says_how_an_epoch_is_ordered() -> None:
    def curriculum(*, epoch: int, **_: object) -> str:
        return "sorted" if epoch == 1 else "random:2"

    keys = OrderKeys(seq_ordering=curriculum)
    assert order(LENGTHS, keys, 1).tolist() == ordered("sorted")
    assert order(LENGTHS, keys, 3).tolist() == ordered("random", 2)
    section, problems = build(OrderKeys, {"seq_ordering": curriculum}, "train.", {})
    assert (section, problems) == (keys, [])
    for wrong in (3, None, "randomly"):
        with pytest.raises(DataError, match=f"seq_ordering: expected the function to return one of .*got {wrong!r} for epoch 2"):
            order(LENGTHS, OrderKeys(seq_ordering=lambda wrong=wrong, **_: wrong), 2)
    backwards = range(len(LENGTHS))[::-1]
    for indices in (backwards, list(backwards), torch.tensor(backwards)):
        found = order(LENGTHS, OrderKeys(seq_ordering=lambda indices=indices, **_: indices), 1)
        assert found.tolist() == list(backwards)
    given = [numpy.roll(numpy.arange(len(LENGTHS)), epoch) for epoch in range(5)]
    keys = OrderKeys(seq_ordering=lambda epoch, **_: given[epoch], partition_epoch=2)
    assert [*order(LENGTHS, keys, 3), *order(LENGTHS, keys, 4)] == given[2].tolist()  # both parts of full epoch 2
    with pytest.raises(DataError, match="expected the function to return each index from 0 to .* once"):
        order(LENGTHS, OrderKeys(seq_ordering=lambda **_: numpy.zeros(len(LENGTHS), int)), 1)
