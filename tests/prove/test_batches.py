"""The same global batches on any number of ranks."""

import numpy
import pytest

from hvdtrain.data.plan.epoch import Plan
from hvdtrain.errors import DataError
from hvdtrain.prove.training import GlobalBatches, first_steps, given

ORDER = numpy.random.default_rng(0).permutation(40).astype(numpy.int64)
PLAN = Plan(ORDER, numpy.array([0, 3, 5, 11, 12, 20, 21, 30, 34, 40]))


def test_each_step_has_the_same_sequences_on_any_number_of_ranks() -> None:
    batches = first_steps(PLAN, 4, 10)
    assert batches.steps == 2, "only one rank has a batch in the last step"
    expected = [set(ORDER[:12].tolist()), set(ORDER[12:34].tolist())]
    for size in (1, 2, 3, 4):
        plan = batches.dealt(size)
        assert plan.num_batches == 2 * size
        steps = [[plan.share(rank, size)[step].tolist() for rank in range(size)] for step in range(2)]
        assert [set().union(*step) for step in steps] == expected
        assert sum(map(len, steps[0])) == 12
        if size < 4:
            sizes = [len(batch) for step in steps for batch in step]
            assert max(sizes[:size]) - min(sizes[:size]) <= 1


def test_the_largest_number_of_ranks_has_the_batches_of_its_own_training() -> None:
    dealt = first_steps(PLAN, 4, 1).dealt(4)
    for rank in range(4):
        assert dealt.share(rank, 4)[0].tolist() == PLAN.share(rank, 4)[0].tolist()


def test_an_epoch_that_is_too_short() -> None:
    with pytest.raises(DataError, match="expected at least 10 batches in an epoch for 10 ranks, got 9") as caught:
        first_steps(PLAN, 10, 3)
    assert caught.value.on_every_rank


def test_batches_are_read_as_they_were_written(tmp_path) -> None:
    batches = first_steps(PLAN, 2, 3)
    batches.save(tmp_path / "batches.npz")
    read = GlobalBatches.load(tmp_path / "batches.npz")
    assert (read.ranks, read.steps) == (2, 3)
    assert read.plan.fingerprint() == batches.plan.fingerprint()


def test_each_update_has_its_learning_rate_however_often_the_engine_asks() -> None:
    updates = 0
    rates = given([0.1, 0.2, 0.3], lambda: updates)
    asked = []
    for updates in range(4):
        asked += [rates.of_step(updates, 0.0, rates.of_epoch(1, [])) for _ in range(2)]
    assert asked == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.3, 0.3]
