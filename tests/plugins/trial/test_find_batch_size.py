"""`--find-batch-size`: tries batches and tells which ones fit, without leaving a trace."""

import re
from pathlib import Path

import pytest
from launching import TOY, hvdtrain

MOST = 60
"""The padded frames for which the memory of the last rank suffices."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "batch_size"), [(None, 1000), (2, 13)])
def test_the_largest_batch_size_is_found(corpus: Path, tmp_path: Path, ranks: int | None, batch_size: int) -> None:
    given = {"corpus": corpus, "model": tmp_path / "exp" / "model", "most": MOST, "max_seqs": -1, "batch_size": batch_size}
    if ranks is not None:  # one of which cannot compute the batch whose statistics the others wait for
        given |= {"use_horovod": True, "layers": "only_statistics", "sync_batch_norm": True}
    ended = hvdtrain(TOY, given, ranks, options=[str(TOY.with_name("oom.py")), "--find-batch-size"])
    assert ended.status == 0, ended.err
    [found] = re.findall(r"^find batch size: batch_size = (\d+) fits on every rank, batch_size = (\d+) does not", ended.out, re.M)
    fits, fails = map(int, found)
    assert fits < fails <= fits + 2
    assert abs(fits - MOST) < 12  # lengths are from 1 to 12, and a batch need not be as large as it may be
    [largest] = re.findall(r"the largest batch that fits: \d+ sequences, padded frames: (\d+) of data", ended.out)
    assert MOST - 12 < int(largest) <= MOST
    assert not (tmp_path / "exp").exists()


def test_limits_that_end_the_search(corpus: Path, tmp_path: Path) -> None:
    given = {"corpus": corpus, "model": tmp_path / "model"}
    options = [str(TOY.with_name("oom.py")), "--find-batch-size"]
    ended = hvdtrain(TOY, {**given, "most": MOST, "ordering": "sorted"}, options=options)
    assert re.search(r"find batch size: max_seqs = [5-9] fits on every rank, max_seqs = [6-9] does not", ended.out), ended.out
    ended = hvdtrain(TOY, given | {"batch_size_train": 30, "max_seqs": 4}, options=options)
    assert re.search(r"find batch size: batch_size_train = \d+ fits, 4 sequences, .*; no other batch is larger", ended.out), (
        ended.out
    )
    ended = hvdtrain(TOY, given | {"most": 3}, options=options)
    assert ended.status == 2
    assert ended.names("max_seqs", "too little for 1 sequences")


@pytest.mark.slow
def test_a_network_of_returnn_tries_batches_too(corpus: Path, tmp_path: Path) -> None:
    given = {"corpus": corpus, "model": tmp_path / "model", "layers": "conv", "part": "two.hdf"}
    ended = hvdtrain(TOY.with_name("network_config.py"), given, options=["--find-batch-size"])
    assert re.search(r"find batch size: batch_size = \d+ fits, .*; no other batch is larger", ended.out), ended.err
