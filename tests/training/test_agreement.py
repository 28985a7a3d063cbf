"""What the ranks agree on, with ranks as threads."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.data.plan.epoch import BatchKeys, Plan, plan
from hvdtrain.data.plan.order import OrderKeys
from hvdtrain.training.agreement import completed_share

LENGTHS = {"data": numpy.random.default_rng(1).integers(1, 20, 101)}


def planned(ordering: str = "random", **limits: Any) -> Plan:
    return plan(LENGTHS, OrderKeys(seq_ordering=ordering), replace(BatchKeys(max_seqs=1), **limits), 1)


def shares(comm: Communicator, made: Plan, distribution: str = "shard") -> list[float]:
    """The share that precedes each step of an epoch, and the whole at its end."""
    feed: Any = SimpleNamespace(distribution=distribution)
    completed = completed_share(comm, feed, made, numpy.array)
    every = comm.size if distribution == "shard" else 1
    steps = max(comm.gather(-(-made.num_batches // every), name="steps"))
    return [completed(step * every) for step in range(steps + 1)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_steps_stand_at_the_same_share_of_an_epoch_on_any_number_of_ranks(size: int) -> None:
    """101 sequences in global batches of 12: the last one has 5, which are one batch of 12, two of 4, three of 2, ..."""
    found = on_ranks(size, lambda comm: shares(comm, planned(max_seqs=12 // size)))
    assert found == [[min(12 * step, 101) / 101 for step in range(10)]] * size


def test_a_resume_on_another_number_of_ranks_goes_on_at_the_same_share() -> None:
    """Positions are batches of a plan that does not depend on the number of ranks, whatever the sizes of its batches."""
    made = planned(max_seqs=None, batch_size=60, balance_ranks=6)
    assert len(set(numpy.diff(made.bounds).tolist())) > 2
    by_size = {size: on_ranks(size, lambda comm: shares(comm, made))[0] for size in (1, 2, 3)}
    assert by_size[1][::6] == by_size[2][::3] == by_size[3][::2]
    assert by_size[1] == [bound / 101 for bound in made.bounds.tolist()]


def test_ranks_with_separate_plans_have_the_same_rates() -> None:
    plans = [planned(max_seqs=None, batch_size=size) for size in (40, 60, 80)]
    first, *others = on_ranks(3, lambda comm: shares(comm, plans[comm.rank], "random_seed_offset"))
    assert others == [first, first]
    assert first[0] == 0.0
    assert first[-1] == 1.0
    assert all(numpy.diff(first) > 0), "also where only some ranks have batches left"


def test_an_epoch_without_sequences() -> None:
    empty = Plan(numpy.zeros(0, dtype=numpy.int64), numpy.zeros(1, dtype=numpy.int64))
    assert on_ranks(2, lambda comm: shares(comm, empty)) == [[0.0], [0.0]]
