"""Batches limited by the cost of sequences instead of their frames."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.costs import costs_of
from hvdtrain.data.plan.epoch import plan
from hvdtrain.data.plan.inputs import PlanInputs
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import DataError

LENGTHS = {
    "data": numpy.random.default_rng(1).integers(0, 500, 700).astype(numpy.int32),
    "classes": numpy.random.default_rng(2).integers(1, 90, 700).astype(numpy.int32),
}
QUADRATIC = {"class": "quadratic", "at": 200}


def greedy(fits: Callable[[list[int]], bool]) -> list[list[int]]:
    """Batches in the order of the sequences, each filled as long as it fits."""
    batches: list[list[int]] = []
    for index in range(700):
        if batches and fits([*batches[-1], index]):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def planned(**keys: Any) -> list[list[int]]:
    made = plan(LENGTHS, OrderKeys(), BatchKeys(**keys), 1)
    return [made.batch(number).tolist() for number in range(made.num_batches)]


def test_limits_are_in_the_unit_of_the_cost() -> None:
    cost = LENGTHS["data"] + LENGTHS["data"].astype(float) ** 2 / 200
    padded = greedy(lambda batch: max(cost[batch]) * len(batch) <= 3000)
    assert planned(batch_cost=QUADRATIC, batch_size=3000) == padded
    assert planned(batch_cost=QUADRATIC, batch_size={"cost": 3000}) == padded
    assert planned(batch_cost=QUADRATIC, packed_batch_size=3000) == greedy(lambda batch: sum(cost[batch]) <= 3000)
    both = greedy(lambda batch: max(cost[batch]) * len(batch) <= 3000 and max(LENGTHS["classes"][batch]) * len(batch) <= 300)
    assert planned(batch_cost=QUADRATIC, batch_size={"cost": 3000, "classes": 300}) == both != padded
    limited = greedy(lambda batch: max(cost[batch]) * len(batch) <= 3000 and len(batch) <= 4)
    assert planned(batch_cost=QUADRATIC, batch_size=3000, max_seqs=4) == limited
    seconds = greedy(lambda batch: max(LENGTHS["data"][batch]) * len(batch) <= 1000)
    assert planned(batch_cost=lambda lengths: lengths["data"] * 0.01, batch_size=10) == seconds  # tenths that add up exactly
    words = greedy(lambda batch: max(LENGTHS["classes"][batch]) * len(batch) <= 300)
    assert planned(batch_cost=lambda lengths: lengths["classes"], batch_size=300) == words
    wide = costs_of(BatchKeys(max_seqs=1, batch_cost=QUADRATIC | {"key": "classes"}), LENGTHS)
    assert wide == pytest.approx(LENGTHS["classes"] + LENGTHS["classes"] ** 2 / 200)


def test_padding_and_lengths_are_still_limited_in_frames() -> None:
    def fits(batch: list[int]) -> bool:
        columns = [LENGTHS[name][batch] for name in LENGTHS]
        few_padding = all(max(column) * len(batch) - sum(column) <= 200 for column in columns)
        return few_padding and len(batch) <= 20

    assert planned(batch_cost=lambda lengths: lengths["data"] * 0 + 1, batch_size=20, max_pad_size=200) == greedy(fits)


def test_ranks_are_balanced_by_cost() -> None:
    """With a cost that is the opposite of the length, the batches of a step are alike in cost, and so are not in frames."""
    keys = BatchKeys(batch_cost=lambda lengths: 1000 // (lengths["data"] + 1), max_seqs=7, balance_ranks=4)
    made = plan(LENGTHS, OrderKeys(seq_ordering="random"), keys, 1)
    costs = made.padded({"cost": 1000 // (LENGTHS["data"].astype(numpy.int64) + 1)})["cost"]
    groups = numpy.sort(costs[: len(costs) // 4 * 4].reshape(-1, 4), axis=1)
    by_cost = groups[numpy.argsort(groups[:, 0], kind="stable")]
    assert (by_cost[1:, 0] >= by_cost[:-1, -1]).all()


def test_costs_are_part_of_a_plan() -> None:
    def inputs(cost: Any) -> PlanInputs:
        return PlanInputs(LENGTHS, OrderKeys(), BatchKeys(max_seqs=9, batch_cost=cost), 1, None, None, None)

    assert inputs(QUADRATIC).checksum() != inputs(QUADRATIC | {"at": 201}).checksum() != inputs(None).checksum()
    texts = [inputs(cost).as_text().get("batch_cost") for cost in (QUADRATIC, QUADRATIC | {"at": 201}, None)]
    assert len(set(texts)) == 3
    assert texts[-1] is None


def test_costs_that_are_none() -> None:
    for cost, why in (
        (lambda lengths: lengths["data"][:3], "expected it to return an array of 700 numbers, got int32 of shape"),
        (lambda lengths: numpy.full(700, numpy.nan), "expected finite costs of 0 or more, got nan for sequence 0"),
        (lambda lengths: -lengths["data"], "expected finite costs of 0 or more, got -"),
        (lambda lengths: lengths["data"] * 1e12, "use a larger unit"),
        (QUADRATIC | {"key": "frames"}, "batch_cost.key: expected one of the data keys data, classes, got 'frames'"),
    ):
        with pytest.raises(DataError, match=why):
            planned(batch_cost=cost, batch_size=100)
    with pytest.raises(DataError, match="expected no data key called 'cost'"):
        plan({"cost": LENGTHS["data"]}, OrderKeys(), BatchKeys(max_seqs=1, batch_cost=lambda lengths: lengths["cost"]), 1)
    for given, rule in (
        ({"class": "cubic"}, "unknown-value"),
        ({"class": "quadratic"}, "out-of-range"),
        ({"class": "quadratic", "at": 0}, "out-of-range"),
        ({"class": "quadratic", "at": 5, "by": "data"}, "unknown-key"),
    ):
        assert [problem.rule for problem in BatchKeys(max_seqs=1, batch_cost=given).problems()] == [rule]
