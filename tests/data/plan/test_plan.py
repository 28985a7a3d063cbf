"""The plan of an epoch: batches and who gets which."""

import functools
import time

import numpy
import pytest
from launching import faults

from hvdtrain.data.plan.batch_keys import BatchKeys, Limits
from hvdtrain.data.plan.epoch import Plan, plan
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import DataError

LENGTHS = numpy.array([5, 3, 9, 1, 7, 2, 8, 4, 6, 10, 5, 3], dtype=numpy.int32)
IN_ORDER = OrderKeys(seq_ordering="default")


def batches_of(made: Plan) -> list[list[int]]:
    return [made.batch(index).tolist() for index in range(made.num_batches)]


def batches(lengths: dict[str, numpy.ndarray], **keys: object) -> list[list[int]]:
    return batches_of(plan(lengths, IN_ORDER, BatchKeys(**keys), 1))


def test_batches_are_those_of_returnn() -> None:
    expected = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert batches({"data": LENGTHS}, batch_size=20) == expected
    assert batches({"data": LENGTHS}, batch_size={"data": 20}) == expected


def test_a_plan_follows_the_order_and_the_epoch() -> None:
    keys = OrderKeys(seq_ordering="random", partition_epoch=3)
    made = [plan({"data": LENGTHS}, keys, BatchKeys(max_seqs=3), epoch) for epoch in (1, 2, 3, 4)]
    assert batches_of(made[0]) == [[2, 3, 4], [10]]
    assert sorted(sum((one.order.tolist() for one in made[:3]), [])) == list(range(12))
    assert batches_of(made[3]) == [[9, 5, 4], [7]]


def test_sorting_goes_by_data_and_without_it_by_the_first_key() -> None:
    by_length = OrderKeys(seq_ordering="sorted")
    columns = {"classes": numpy.array([1, 2, 3]), "data": numpy.array([3, 2, 1])}
    assert plan(columns, by_length, BatchKeys(max_seqs=9), 1).order.tolist() == [2, 1, 0]
    del columns["data"]
    assert plan(columns, by_length, BatchKeys(max_seqs=9), 1).order.tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("num_batches", [1, 2, 6, 7, 12])
def test_ranks_share_every_batch_exactly_once_from_any_start(size: int, num_batches: int) -> None:
    made = Plan(numpy.arange(2 * num_batches), numpy.arange(0, 2 * num_batches + 1, 2))
    for start in range(num_batches + 1):
        shares = [[batch.tolist() for batch in made.rank_batches(rank, size, start)] for rank in range(size)]
        assert sorted(sum(shares, [])) == batches_of(made)[start:]
        counts = [len(share) for share in shares]
        assert max(counts) == -(-(num_batches - start) // size)  # as many steps as it takes, and no more
        assert max(counts) - min(counts) <= 1


def test_batch_i_goes_to_rank_i_modulo_size() -> None:
    made = Plan(numpy.arange(7), numpy.arange(8))
    assert [[int(batch[0]) for batch in made.rank_batches(rank, 3)] for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [[int(batch[0]) for batch in made.rank_batches(rank, 2, start=3)] for rank in range(2)] == [[3, 5], [4, 6]]


def test_fingerprints_tell_plans_apart() -> None:
    keys = OrderKeys(seq_ordering="random")
    first = plan({"data": LENGTHS}, keys, BatchKeys(max_seqs=3), 1)
    assert plan({"data": LENGTHS}, keys, BatchKeys(max_seqs=3), 1).fingerprint == first.fingerprint
    others = [
        plan({"data": LENGTHS}, keys, BatchKeys(max_seqs=3), 2),  # another order
        plan({"data": LENGTHS}, keys, BatchKeys(max_seqs=4), 1),  # other batches
        plan({"data": LENGTHS[:11]}, keys, BatchKeys(max_seqs=3), 1),  # other data
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_no_limit_is_written_as_minus_one() -> None:
    assert batches({"data": LENGTHS}, batch_size=20, max_seqs=-1) == batches({"data": LENGTHS}, batch_size=20)


def test_a_limit_is_needed_and_each_is_checked() -> None:
    assert faults(BatchKeys().problems()) == faults(BatchKeys(max_seqs=-1).problems()) == ["batch_size: missing"]
    for enough in (BatchKeys(batch_size=1), BatchKeys(max_seqs=1), BatchKeys(max_seqs=-1, packed_batch_size=3)):
        assert faults(enough.problems()) == []
    least = {"batch_size": 1, "packed_batch_size": 1, "max_pad_size": 0, "max_seq_length": 0, "min_seq_length": 0}
    for name, value in least.items():
        assert faults(BatchKeys(**{"batch_size": 1, name: {"data": value - 1}}).problems()) == [f"{name}: out-of-range"]


def test_sizes_may_be_functions_of_the_epoch() -> None:
    keys = BatchKeys(
        batch_size=lambda epoch, **_: {"data": 20 * epoch} if epoch < 3 else None,
        max_seqs=lambda *, epoch, **_: (-1, 3, 4)[epoch - 1],
    )
    assert faults(keys.problems()) == []
    assert [keys.limits(epoch) for epoch in (1, 2, 3)] == [
        Limits(batch_size={"data": 20}),
        Limits(batch_size={"data": 40}, max_seqs=3),
        Limits(max_seqs=4),
    ]
    assert batches_of(plan({"data": LENGTHS}, IN_ORDER, keys, 3)) == batches({"data": LENGTHS}, max_seqs=4)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"batch_size": lambda **_: 0}, "batch_size: expected the function to return a positive integer, a dict of them or None"),
        ({"batch_size": lambda **_: {"data": "x"}}, "batch_size: .* got {'data': 'x'} for epoch 1"),
        ({"batch_size": lambda **_: -1}, "batch_size: .* got -1 for epoch 1"),
        ({"max_seqs": lambda **_: 2.5}, "max_seqs: expected the function to return a positive integer, -1 or None, got 2.5"),
        ({"max_seqs": lambda **_: {"data": 3}}, "max_seqs: .* got {'data': 3} for epoch 1"),
    ],
)
def test_functions_that_return_no_size(keys: dict[str, object], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        plan({"data": LENGTHS}, IN_ORDER, BatchKeys(**keys), 1)


def test_training_and_evaluation_may_have_sizes_of_their_own() -> None:
    keys = BatchKeys(batch_size=20, max_seqs_train=3, batch_size_dev=40, max_seqs_dev=-1, shuffle_batches=True, balance_ranks=4)
    train, dev = keys.training_keys(), keys.evaluation_keys()
    assert (train.limits(1), dev.limits(1)) == (Limits(20, 3), Limits(40, None))
    assert (train.shuffle_batches, train.balance_ranks, dev.shuffle_batches, dev.balance_ranks) == (True, 4, False, 0)
    assert faults(BatchKeys(batch_size_train=3).problems()) == ["batch_size_dev: missing"]
    assert faults(BatchKeys(batch_size_train=3, max_seqs_dev=1).problems()) == []


@pytest.mark.parametrize("seed", range(5))
def test_padding_is_what_counting_frames_gives(seed: int) -> None:
    generator = numpy.random.default_rng(seed)
    lengths = {key: generator.integers(0, 30, 90).astype(numpy.int32) for key in ("data", "classes")}
    made = plan(lengths, OrderKeys(seq_ordering="random"), BatchKeys(batch_size=100, max_seqs=7, max_seq_length=25), 1)
    for key, column in lengths.items():
        padded = sum(column[batch].max() * len(batch) for batch in made.rank_batches(0, 1))
        real = sum(column[batch].sum() for batch in made.rank_batches(0, 1))
        assert made.padding(lengths)[key] == pytest.approx((padded - real) / padded)
    assert plan({"data": LENGTHS}, IN_ORDER, BatchKeys(max_seqs=1), 1).padding({"data": LENGTHS}) == {"data": 0.0}
    assert Plan(LENGTHS[:0], numpy.zeros(1, int)).padding({"data": LENGTHS}) == {"data": 0.0}


def test_a_million_sequences_are_planned_within_seconds() -> None:
    """In processor time, several times what it takes, for machines that do other things."""
    frames = numpy.random.default_rng(0).integers(10, 2000, 1_000_000).astype(numpy.int32)
    lengths = {"data": frames, "classes": frames // 4}
    keys = BatchKeys(batch_size={"data": 20000, "classes": 6000}, max_seqs=100, max_seq_length=1900, balance_ranks=8)
    began = time.process_time()
    made = plan(lengths, OrderKeys(seq_ordering="laplace:.1000"), keys, 1)
    made.padding(lengths)
    assert time.process_time() - began < 10


def test_functions_of_the_epoch_have_to_take_it() -> None:
    lengths = {"data": numpy.arange(1, 5, dtype=numpy.int32)}
    with pytest.raises(
        DataError, match=r"^seq_ordering: expected a function that takes epoch=.*, got one with the arguments \(\)$"
    ):
        plan(lengths, OrderKeys(seq_ordering=lambda: "random"), BatchKeys(max_seqs=2), 1)
    with pytest.raises(DataError, match=r"^batch_size: expected a function that takes epoch=.*with the arguments \(number\)$"):
        plan(lengths, OrderKeys(), BatchKeys(batch_size=lambda number: 5), 1)

    @functools.wraps(len)
    def decorated(*, epoch: int) -> int:
        return epoch + 1

    assert plan(lengths, OrderKeys(), BatchKeys(max_seqs=decorated), 1).num_batches == 2
