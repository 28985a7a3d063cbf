"""What is computed of a plan in blocks of sequences, and with small integers, does not depend on their size."""

import numpy
import pytest

from hvdtrain.data.plan import bounds, epoch, order
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.epoch import Plan, plan
from hvdtrain.data.plan.order_keys import OrderKeys

LENGTHS = {
    "data": numpy.random.default_rng(0).integers(0, 60, 500).astype(numpy.int32),
    "classes": numpy.random.default_rng(1).integers(0, 60, 500).astype(numpy.int32),
}
LIMITS = [
    {"max_seqs": 7},
    {"batch_size": 200},
    {"batch_size": {"data": 400}, "packed_batch_size": {"data": 200, "classes": 250}, "max_seqs": 9},
    {"batch_size": 500, "max_pad_size": {"classes": 60}, "shuffle_batches": True},
    {"batch_size": 500, "max_pad_size": 90, "packed_batch_size": 300, "balance_ranks": 4},
]


@pytest.mark.parametrize("block", [1, 7, 64, 500])
@pytest.mark.parametrize("limits", LIMITS)
def test_plans_do_not_depend_on_the_size_of_blocks(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, object], block: int
) -> None:
    def found() -> tuple[Plan, list[object]]:
        made = plan(LENGTHS, OrderKeys(seq_ordering="laplace:.50"), BatchKeys(**limits), 1)  # type: ignore[arg-type]
        columns = [column.tolist() for column in made.longest(LENGTHS).values()]
        return made, [made.order.tolist(), made.bounds.tolist(), made.fingerprint, made.padding(LENGTHS), columns]

    made, expected = found()
    for name, column in made.longest(LENGTHS).items():
        assert column.tolist() == [int(LENGTHS[name][batch].max()) for batch in made.rank_batches(0, 1)]
    for module in (bounds, epoch):
        monkeypatch.setattr(module, "SEQUENCES_AT_ONCE", block)
    assert found()[1] == expected


@pytest.mark.parametrize("method", ["laplace:.50", "sorted", "sorted_reverse", "sort_bin_shuffle:7", "sort_bin_shuffle_x2:7"])
def test_sorting_does_not_depend_on_the_type_of_lengths(method: str) -> None:
    """Of 16 bits where they fit, of 64 elsewhere; many sequences have the same length and come in the order of their indices."""
    keys = OrderKeys(seq_ordering=method)
    column = LENGTHS["data"] // 4
    found = order.order(column, keys, 1).tolist()
    for stretched in (column * 5000, column * 4369, column.astype(numpy.int64) * 10**9, column.astype(numpy.uint8)):
        assert order.order(stretched, keys, 1).tolist() == found
    if method.startswith("sorted"):
        assert found == sorted(range(500), key=lambda index: -column[index] if "reverse" in method else column[index])


def test_a_share_is_a_sequence() -> None:
    share = plan(LENGTHS, OrderKeys(), BatchKeys(max_seqs=100), 1).rank_batches(1, 2)
    assert len(share) == 2
    assert [batch[0] for batch in share] == [100, 300]
    assert share[-1].tolist() == list(range(300, 400))
    assert [batch[0] for batch in share[1:]] == [300]
    assert not plan(LENGTHS, OrderKeys(), BatchKeys(max_seqs=500), 1).rank_batches(1, 2)
    with pytest.raises(IndexError):
        share[2]
