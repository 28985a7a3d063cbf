"""The order of batches: shuffled, or dealt out so that the ranks of a step have about the same to do."""

from dataclasses import replace

import numpy
import pytest
from launching import ROOT, faults, launch

from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.bounds import group_by_cost, random_order
from hvdtrain.data.plan.epoch import Plan, plan
from hvdtrain.data.plan.order_keys import OrderKeys

RANDOM = OrderKeys(seq_ordering="random")


def corpus(size: int, seed: int = 0) -> dict[str, numpy.ndarray]:
    frames = numpy.random.default_rng(seed).integers(10, 2001, size).astype(numpy.int32)
    return {"data": frames, "classes": frames // 4}


def batch_sets(made: Plan) -> list[tuple[int, ...]]:
    return sorted(tuple(made.batch(index).tolist()) for index in range(made.num_batches))


def step_costs(made: Plan, lengths: dict[str, numpy.ndarray], size: int) -> int:
    """Padded frames that the slowest ranks of all steps have to go through."""
    costs = made.padded(lengths)["data"]
    return int(sum(costs[start : start + size].max() for start in range(0, len(costs), size)))


def test_orders_of_batches_are_held_to_these() -> None:
    """A later version must not train on the same data in another order."""
    lengths = {"data": numpy.array([5, 3, 9, 1, 7, 2, 8, 4, 6, 10, 5, 3])}
    made = plan(lengths, OrderKeys(), BatchKeys(max_seqs=2, shuffle_batches=True), 2)
    assert made.order.tolist() == [2, 3, 0, 1, 4, 5, 8, 9, 10, 11, 6, 7]
    made = plan(lengths, OrderKeys(), BatchKeys(max_seqs=1, balance_ranks=4), 2)
    assert made.order.tolist() == [7, 0, 10, 8, 3, 5, 1, 11, 4, 6, 2, 9]
    made = plan(lengths, OrderKeys(), BatchKeys(max_seqs=1, online_shuffle_batches=5), 2)
    assert made.order.tolist() == [1, 0, 2, 4, 3, 8, 9, 5, 6, 7, 11, 10]


def test_groups_are_neighbours_in_size_and_the_rest_comes_last() -> None:
    costs = numpy.random.default_rng(1).permutation(101)
    result = group_by_cost(costs, 4, numpy.random.RandomState(3))
    assert sorted(result.tolist()) == list(range(101))
    groups = costs[result[:100]].reshape(25, 4)
    assert (numpy.diff(groups, axis=1) <= 2).all()  # 2 where the rest was taken out
    assert (numpy.diff(groups, axis=1) == 2).sum() <= 1
    assert groups[:, 0].tolist() != sorted(groups[:, 0].tolist())


@pytest.mark.parametrize("group", [1, 2, 7, 50, 51, 1000])
def test_every_batch_is_dealt_once(group: int) -> None:
    for size in (0, 1, 2, 50):
        costs = numpy.random.default_rng(size).integers(0, 9, (size, 2))
        assert sorted(group_by_cost(costs, group, numpy.random.RandomState(0)).tolist()) == list(range(size))


def test_of_batches_of_the_same_size_those_of_similar_longest_sequence_go_together() -> None:
    costs = numpy.array([[9, 1], [9, 8], [9, 2], [9, 7]])
    assert sorted(map(sorted, group_by_cost(costs, 2, numpy.random.RandomState(0)).reshape(2, 2).tolist())) == [[0, 2], [1, 3]]


def test_shuffling_and_balancing_change_the_order_of_batches_only() -> None:
    lengths = corpus(500)
    plain = plan(lengths, RANDOM, BatchKeys(max_seqs=8), 3)
    for keys in (BatchKeys(max_seqs=8, shuffle_batches=True), BatchKeys(max_seqs=8, balance_ranks=4)):
        made = plan(lengths, RANDOM, keys, 3)
        assert batch_sets(made) == batch_sets(plain)
        assert made.order.tolist() != plain.order.tolist()
        assert (made.order.dtype, made.bounds.dtype) == (numpy.int64, numpy.int64)
        numpy.random.seed(5)
        assert plan(lengths, RANDOM, keys, 3).fingerprint == made.fingerprint


def test_the_order_of_batches_follows_the_seed_and_the_part() -> None:
    lengths = {"data": numpy.arange(1, 61, dtype=numpy.int32)}
    for keys in (BatchKeys(max_seqs=2, shuffle_batches=True), BatchKeys(max_seqs=2, balance_ranks=2)):

        def orders(keys: BatchKeys = keys, **order_keys: int) -> list[list[int]]:
            return [plan(lengths, OrderKeys(**order_keys), keys, epoch).order.tolist() for epoch in (1, 2, 3, 4)]

        assert len({tuple(order) for order in orders()}) == 4
        assert len({tuple(order) for order in orders(fixed_random_seed=3)}) == 1
        parts = orders(partition_epoch=2)
        assert [sorted(part) for part in parts] == 2 * [list(range(30)), list(range(30, 60))]
        assert [number - 30 for number in parts[1]] != parts[0]  # no two parts in the same order


@pytest.mark.parametrize("size", [2, 4, 8])
def test_balanced_steps_cost_less_for_every_number_of_ranks_that_divides_the_group(size: int) -> None:
    lengths = corpus(4000)
    plain = plan(lengths, RANDOM, BatchKeys(max_seqs=8), 1)
    balanced = plan(lengths, RANDOM, BatchKeys(max_seqs=8, balance_ranks=8), 1)
    ideal = plain.padded(lengths)["data"].sum() / size
    assert step_costs(balanced, lengths, size) < 1.03 * ideal
    assert step_costs(plain, lengths, size) > 1.04 * ideal


@pytest.mark.parametrize("num_batches", [1, 6, 8, 9, 50])
@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_shuffling_within_windows_is_returnns(num_batches: int, window: int) -> None:
    """Given the same random numbers: RETURNN draws its own in every run."""
    pipeline = pytest.importorskip("returnn.torch.data.pipeline")
    batches = [[{"number": number}] for number in range(num_batches)]
    theirs = pipeline.ShufflingDataPipe(batches, buffer_size=window, monotonic_data_keys=(), seed=3)
    ours = random_order(num_batches, numpy.random.RandomState(3), window).tolist()
    assert ours == [batch[0]["number"] for batch in theirs]
    assert all(number // window == place // window for place, number in enumerate(ours))


def test_windows_of_batches_hold_on_any_number_of_ranks() -> None:
    """N counts the batches of all ranks: the plan is the same on any number of them."""
    lengths = corpus(500)
    plain = plan(lengths, RANDOM, BatchKeys(max_seqs=8), 3)
    for given in (10, {"buffer_size": 10}):
        keys = BatchKeys(max_seqs=8, online_shuffle_batches=given)
        assert faults(keys.problems()) == []
        assert keys.evaluation_keys().shuffle_window == 0
        made = plan(lengths, RANDOM, keys, 3)
        assert made.order.tolist() != plain.order.tolist()
        for first in range(0, made.num_batches, 10):
            window = range(first, min(first + 10, made.num_batches))
            one, other = ({tuple(some.batch(number).tolist()) for number in window} for some in (made, plain))
            assert one == other
    for wrong, rule in (({"buffer_size": 0}, "out-of-range"), ({"buffer_size": 3, "seed": 1}, "wrong-type"), ({}, "wrong-type")):
        keys = BatchKeys(max_seqs=8, online_shuffle_batches=wrong)
        assert faults(keys.problems()) == [f"online_shuffle_batches: {rule}"]
    both = BatchKeys(max_seqs=8, online_shuffle_batches=3, shuffle_batches=True)
    assert faults(both.problems()) == ["online_shuffle_batches: conflict"]


def test_nothing_to_shuffle() -> None:
    assert random_order(0, numpy.random.RandomState(0)).tolist() == []
    nothing = {"data": numpy.zeros(0, numpy.int32)}
    assert plan(nothing, RANDOM, BatchKeys(max_seqs=2, shuffle_batches=True), 1).num_batches == 0
    assert plan(nothing, RANDOM, BatchKeys(max_seqs=2, balance_ranks=3), 1).num_batches == 0


def test_the_benchmark_prints_a_table() -> None:
    finished = launch([str(ROOT / "benchmarks" / "balance.py"), "--sequences", "3000", "--ranks", "2", "4"])
    assert finished.status == 0, finished.err
    saved = [float(line.split()[-1].rstrip("%")) for line in finished.out.splitlines() if line.endswith("%")]
    assert len(saved) == 16
    assert "balance_ranks" in finished.out
    assert max(saved) > 10


@pytest.mark.parametrize("group", [0, 4])
def test_the_largest_batches_come_first_and_then_those_with_the_longest_sequences(group: int) -> None:
    lengths, keys = corpus(1001), BatchKeys(batch_size=20_000, balance_ranks=group, shuffle_batches=not group)
    usual, made = (plan(lengths, RANDOM, replace(keys, largest_batches_first=first), 1) for first in (False, True))
    assert batch_sets(made) == batch_sets(usual)
    frames, longest = (numpy.sum(list(columns.values()), axis=0) for columns in (usual.padded(lengths), usual.longest(lengths)))
    size = group or 1
    numbers = [list(range(start, start + size)) for start in range(0, usual.num_batches // size * size, size)]
    largest = sorted(numbers, key=lambda batches: -max(frames[batches]))[: 16 // size]
    with_longest = sorted(numbers, key=lambda batches: -max(longest[batches]))[: 16 // size]
    first = [*largest, *(batches for batches in with_longest if batches not in largest)]
    rest = [batches for batches in numbers if batches not in first]
    expected = [batch for batches in [*first, *rest] for batch in batches]
    expected += range(len(expected), usual.num_batches)  # an incomplete group stays last
    assert [made.batch(place).tolist() for place in range(made.num_batches)] == [
        usual.batch(batch).tolist() for batch in expected
    ]
    assert len(first) > 16 or group  # some have long sequences, but few of them
    evaluated = plan(lengths, RANDOM, replace(keys, largest_batches_first=True).evaluation_keys(), 1)
    assert evaluated.bounds.tolist() == plan(lengths, RANDOM, keys.evaluation_keys(), 1).bounds.tolist()
    assert evaluated.order.tolist() == plan(lengths, RANDOM, keys.evaluation_keys(), 1).order.tolist()
