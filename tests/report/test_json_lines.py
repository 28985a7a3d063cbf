"""The file scores.jsonl, and the scores in it."""

import json
from pathlib import Path

import pytest

from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.json_lines import JsonLines
from hvdtrain.runtime.scores import Scores


def test_scores_jsonl_is_put_right(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    lines = JsonLines(path)
    lines.go_on(0, None)
    assert not path.exists()
    for epoch in (1, 2, 3):
        lines.epoch(EpochReport(epoch, 1, epoch, 1.0, 0.5, 0.1, 3, {"dev_loss_ce": float("nan")}))
    path.write_text(path.read_text() + '{"epoch": 4, "sco')

    def epochs() -> list[int]:
        return [json.loads(line)["epoch"] for line in path.read_text().splitlines()]

    JsonLines(path).go_on(4, {"epoch": 4})  # the checkpoint was written, the line was not
    assert epochs() == [1, 2, 3, 4]
    JsonLines(path).go_on(2, {"epoch": 2})  # continues from an older one
    assert epochs() == [1, 2]
    before = path.read_text()
    JsonLines(path).go_on(2, {"epoch": 2, "other": 1})
    assert path.read_text() == before


@pytest.mark.parametrize("numbers", [[1e16, 1.0, -1e16, 3e-17], [0.1] * 10, [1e308, 1e308, -1e308], [], [0.0, -0.0]])
def test_compact_scores_have_the_same_means(numbers: list[float]) -> None:
    scores, more = Scores(), Scores()
    for number in numbers:
        scores.add("a", number, 3.0)
    more.add("a", 0.3, 1.0)
    compact = Scores.from_state(scores.compact().state())
    assert repr(Scores.merge([compact, more]).means()) == repr(Scores.merge([scores, more]).means())
    for odd in (float("inf"), float("nan"), float("-inf")):
        scores.add("a", odd, 1.0)
        assert repr(scores.compact().means()) == repr(scores.means())
