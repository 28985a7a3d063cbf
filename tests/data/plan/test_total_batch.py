"""Batch sizes of all ranks together: each rank gets its share."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import TOY, refused

from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.epoch import plan
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import DataError
from hvdtrain.settings import read_settings


def test_each_rank_gets_its_share_rounded_down() -> None:
    keys = BatchKeys(batch_size_total=1000, max_seqs_total=16)
    limits = [keys.per_rank(ranks).training_keys().limits(1) for ranks in (1, 3, 16)]
    assert [(one.batch_size, one.max_seqs) for one in limits] == [(1000, 16), (333, 5), (62, 1)]
    assert BatchKeys(batch_size_total={"data": 900, "classes": 3}).per_rank(4).batch_size == {"data": 225, "classes": 1}
    assert BatchKeys(max_seqs=5).per_rank(4) == BatchKeys(max_seqs=5)


def test_evaluation_is_divided_unless_it_has_keys_of_its_own() -> None:
    keys = BatchKeys(max_seqs_total=16)
    assert keys.per_rank(4).evaluation_keys().max_seqs == 4
    assert BatchKeys(max_seqs_total=16, max_seqs_dev=7).per_rank(4).evaluation_keys().max_seqs == 7


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_a_step_takes_the_same_sequences_on_any_number_of_ranks(ranks: int) -> None:
    lengths = {"data": numpy.random.default_rng(0).integers(1, 50, 1000).astype(numpy.int32)}
    order = OrderKeys(seq_ordering="random")

    def steps(size: int) -> list[list[int]]:
        shares = [
            plan(lengths, order, BatchKeys(max_seqs_total=24).per_rank(size), 1).rank_batches(rank, size) for rank in range(size)
        ]
        rounds = max(len(share) for share in shares)
        return [sorted(numpy.concatenate([share[i] for share in shares if i < len(share)]).tolist()) for i in range(rounds)]

    assert steps(ranks) == steps(1)


def test_a_remainder_is_told_with_both_numbers() -> None:
    told = BatchKeys(max_seqs_total=20).remainder_line(3)
    assert told is not None
    assert told.startswith("max_seqs_total: 3 ranks take 18 sequences in a step instead of 20, 6 each")
    assert BatchKeys(max_seqs_total=20).remainder_line(4) is BatchKeys(max_seqs=20).remainder_line(3) is None


def test_fewer_sequences_than_ranks_are_refused() -> None:
    with pytest.raises(DataError, match="max_seqs_total: expected at least one sequence for each of 8 ranks, got 6"):
        BatchKeys(max_seqs_total=6).per_rank(8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_seqs_total": 8}, "max_seqs_total: conflict"),
        ({"batch_size_total": 8, "batch_size_train": 9}, "batch_size_total: conflict"),
        ({"max_seqs": "none", "batch_size_total": {"data": 0}}, "batch_size_total: out-of-range"),
    ],
)
def test_mistakes(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    texts = {name: str(value) for name, value in {"corpus": tmp_path, "model": tmp_path / "m", **overrides}.items()}
    with refused(message):
        read_settings([TOY], texts)
