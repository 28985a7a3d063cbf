"""The trace of what was trained on, and scores.jsonl, after kills."""

import json
from collections import Counter
from pathlib import Path

import numpy
import pytest
from launching import ROOT, launch

from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.json_lines import JsonLines
from hvdtrain.runtime.scores import Scores
from hvdtrain.training.trace import Trace, has_begun, num_runs, trained_on


def test_steps_that_were_lost_with_a_kill_do_not_count(tmp_path: Path) -> None:
    prefix = tmp_path / "deep" / "trace"
    assert num_runs(prefix) == 0
    first = [Trace(prefix, 0, rank, 0) for rank in range(2)]
    for step in range(4):
        for rank in range(2):
            first[rank](1, step, numpy.array([10 * rank + step]))
    assert num_runs(prefix) == 1
    assert has_begun(prefix, 0, 2)
    assert not has_begun(prefix, 0, 3)
    assert not has_begun(prefix, 1, 1)
    second = Trace(prefix, 1, 0, 2)  # continues from a checkpoint after step 2, alone
    assert not has_begun(prefix, 1, 1), "no step yet"
    second(1, 2, numpy.array([7, 8]))
    assert has_begun(prefix, 1, 1)
    second(2, 3, numpy.array([0]))
    with (tmp_path / "deep" / "trace.run-1.rank-0.jsonl").open("a") as file:
        file.write('{"epoch": 2, "st')  # killed
    assert trained_on(prefix) == {1: Counter([0, 1, 10, 11, 7, 8]), 2: Counter([0])}


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


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "kills", "told"),
    [
        pytest.param("saves", 200, "after each, the newest checkpoint was complete", marks=pytest.mark.slow),
        ("starts", 50, "training resumed 50 times"),
        ("soak", 20, "exactly the sequences of an undisturbed run, each once"),
        ("elastic", 20, "all scores are those of the undisturbed run, to the last bit"),
        ("elastic --least 2", 20, "exactly the sequences of an undisturbed run, each once"),
    ],
)
def test_kills_at_random_moments_do_no_harm(request: pytest.FixtureRequest, kind: str, kills: int, told: str) -> None:
    if not request.config.getoption("--soak"):
        if kind != "saves":
            pytest.skip("takes minutes (make test-soak)")
        kills = 5
    finished = launch([ROOT / "benchmarks" / "kills.py", *kind.split(), "--kills", kills], timeout=3600)
    assert finished.status == 0, finished.err
    assert told in finished.out
