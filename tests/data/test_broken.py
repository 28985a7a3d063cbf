"""The count of broken sequences."""

import numpy
import pytest

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.types import Batch
from hvdtrain.errors import BrokenSequence


def test_each_sequence_counts_once_over_ranks_and_epochs() -> None:
    ranks = [BrokenSequences("train", 3) for _ in range(2)]
    ranks[0].leave_out(["no audio"])
    ranks[1].leave_out(["no audio"])
    ranks[0].add([(5, "a.wav")])
    for _ in range(2):
        found = [rank.take() for rank in ranks]
        lines = [rank.merge(found) for rank in ranks]
    assert lines == [[], []]
    assert [rank.number for rank in ranks] == [2, 2]
    ranks[1].add([(5, "a.wav")])
    assert ranks[1].take() == []
    ranks[1].add([(6, "b.wav")])
    ranks[0].add([(7, "c.wav")])
    found = [rank.take() for rank in ranks]
    for rank in ranks:
        with pytest.raises(
            BrokenSequence, match=r"at most 3 broken sequences \(skip_broken\), got 4 broken: c.wav; b.wav"
        ) as raised:
            rank.merge(found)
        assert raised.value.on_every_rank


def test_a_rank_that_finds_too_many_does_not_wait_for_the_others() -> None:
    broken = BrokenSequences("train", 1)
    with pytest.raises(BrokenSequence, match="got 2 broken: a; b$"):
        broken.add([(1, "a"), (2, "b")])


def test_a_batch_knows_what_was_planned() -> None:
    batch = Batch({}, numpy.array([4, 2]), broken=[(9, "a.wav")])
    assert batch.planned.tolist() == [4, 2, 9]
    assert batch.if_any is batch
    assert Batch({}, numpy.array([], numpy.int64), broken=[(9, "a.wav")]).if_any is None
