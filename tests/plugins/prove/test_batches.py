"""The same global batches on any number of ranks."""

import pickle

import numpy
import pytest

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.errors import DataError
from hvdtrain.plugins.prove.training import choose_steps, fixed_rates, written

ORDER = numpy.random.default_rng(0).permutation(40).astype(numpy.int64)
PLAN = Plan(ORDER, numpy.array([0, 3, 5, 11, 12, 20, 21, 30, 34, 40]))


def test_each_step_has_the_same_sequences_on_any_number_of_ranks_and_is_at_the_same_share_of_the_epoch() -> None:
    """The last step included, in which only one of 4 ranks has a batch."""
    batches = choose_steps(PLAN, 4, 10)
    assert (batches.steps, batches.begin, batches.end) == (3, 2, 1)
    expected = [set(ORDER[:12].tolist()), set(ORDER[12:34].tolist()), set(ORDER[34:].tolist())]
    for size in (1, 2, 3, 4, 9):
        plan = batches.deal(size)
        assert plan.num_batches == {1: 3, 2: 6, 3: 9, 4: 9, 9: 24}[size], "a batch has a sequence"
        assert plan.bounds[: 3 * size : size].tolist() == [0, 12, 34]
        steps = [
            [index for batch in list(plan.rank_batches(0, 1))[step * size : (step + 1) * size] for index in batch]
            for step in range(3)
        ]
        assert [set(step) for step in steps] == expected
        assert list(map(len, steps)) == [12, 22, 6]
        if size != 4:
            counts = numpy.diff(plan.bounds)[:size]
            assert max(counts) - min(counts) <= 1


def test_the_largest_number_of_ranks_has_the_batches_of_its_own_training() -> None:
    assert choose_steps(PLAN, 4, 1).deal(4) is PLAN


@pytest.mark.parametrize(("steps", "begin", "end"), [(1, 1, 0), (2, 1, 1), (5, 3, 2), (9, 5, 4), (100, 5, 4)])
def test_the_beginning_and_the_end_of_an_epoch_are_trained(steps: int, begin: int, end: int) -> None:
    batches = choose_steps(PLAN, 1, steps)
    assert (batches.begin, batches.end) == (begin, end)


def test_an_epoch_that_is_too_short() -> None:
    with pytest.raises(DataError, match="expected at least 10 batches in an epoch for 10 ranks, got 9") as caught:
        choose_steps(PLAN, 10, 3)
    assert caught.value.on_every_rank


def test_batches_in_a_file_are_the_same(tmp_path) -> None:
    batches = choose_steps(PLAN, 2, 3)
    (tmp_path / "batches").write_bytes(pickle.dumps(batches))
    read = written(tmp_path / "batches")
    assert (read.ranks, read.steps, read.begin, read.end) == (2, 5, 2, 1)
    assert read.plan.fingerprint == batches.plan.fingerprint


def test_each_update_has_its_learning_rate_however_often_the_engine_asks() -> None:
    updates = 0
    rates = fixed_rates([0.1, 0.2, 0.3], lambda: updates)
    asked = []
    for updates in range(4):
        asked += [rates.step_rate(updates, 0.0, rates.epoch_rate(1, Progress())) for _ in range(2)]
    assert asked == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.3, 0.3]
