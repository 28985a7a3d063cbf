"""The trace of what was trained on, after kills."""

from collections import Counter
from pathlib import Path

import numpy
import pytest
from launching import ROOT, launch

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.trace.records import Trace, has_begun, num_runs, trained_on


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
    second_path = tmp_path / "deep" / "trace.run-1.rank-0.jsonl"
    second = Trace(prefix, 1, 0, 2)  # continues from a checkpoint after step 2, alone
    assert not has_begun(prefix, 1, 1), "no step yet"
    second(1, 2, numpy.array([7, 8]))
    assert has_begun(prefix, 1, 1)
    second(2, 3, numpy.array([0]))
    with second_path.open("a") as file:
        file.write('{"epoch": 2, "st')  # killed
    with pytest.raises(ConfigError, match=f"trace_sequences: expected a writable file, got {second_path}/x"):
        Trace(second_path / "x", 0, 0, 0)
    assert trained_on(prefix) == {1: Counter([0, 1, 10, 11, 7, 8]), 2: Counter([0])}


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
