"""A training of one process, started as a user does, and what it tells of its batches."""

import json
import re
from collections import Counter
from pathlib import Path

from launching import TOY, hvdtrain


def test_balanced_batches_and_their_padding(corpus: Path, tmp_path: Path) -> None:
    overrides = {"corpus": corpus, "model": tmp_path / "model", "num_epochs": 2, "max_seqs": 5, "balance_ranks": 4}
    finished = hvdtrain(TOY, {**overrides, "record": tmp_path / "ids", "max_seq_length": 11}, timeout=300)
    assert finished.status == 0, finished.err
    assert re.search(r"^train: a full epoch loses \d+ of 231 sequences", finished.out, flags=re.MULTILINE)
    seen = Counter((tmp_path / "ids.0").read_text().split("\n"))
    assert set(seen.values()) == {1}
    reports = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    for epoch, report in enumerate(reports, start=1):
        assert report["num_sequences"] == (len(seen) - 1) // 2
        assert set(report["padding"]) == {"data", "classes", "id"}
        assert 0 < report["padding"]["data"] < 1
        assert report["padding"]["id"] == 0
        assert f"train epoch {epoch}, padding: data {report['padding']['data']:.1%}, " in finished.out


def test_training_on_chunks(corpus: Path, tmp_path: Path) -> None:
    overrides = {"corpus": corpus, "model": tmp_path / "model", "chunking": "4:2"}
    finished = hvdtrain(
        TOY, {**overrides, "evaluated": True, "shuffle_batches": True, "train.seq_ordering": "random_blocks:10"}, timeout=300
    )
    assert finished.status == 0, finished.err
    assert re.search(r"^train: \d+ chunks of 231 sequences$", finished.out, flags=re.MULTILINE)
    (report,) = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert report["num_sequences"] == 231
    assert report["steps"] > 231 / 12
