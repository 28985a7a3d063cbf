"""A rank that is slower than the others is named with the cause, and none is named if none is slower: on real ranks."""

import re
from pathlib import Path

import pytest
from trainings import ResultsOf, Run, trains

pytestmark = pytest.mark.slow

RUN = Run("torch", "horovod", 2)

# What takes 0.1 s a batch on every rank, and the rank on which it takes 30 % longer.
PACES = {"computing": ("compute", 1), "reading": ("data", 0), "alike": ("compute", -1), "alike_reading": ("data", -1)}
CASES = [("grad", name) for name in PACES] + [("param", "computing"), ("param", "alike")]
CAUSES = {"computing": "computing", "reading": "waiting for data"}


@trains(slow=[RUN], apart=True)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {
        f"{mode}-{name}": {
            "slow": list(PACES[name]),
            "horovod_reduce_type": mode,
            "horovod_param_sync_step": 3,
        }
        for mode, name in CASES
    }


@pytest.mark.quiet
@pytest.mark.parametrize(("mode", "name"), CASES)
def test_slow_ranks_are_named(results: ResultsOf, mode: str, name: str) -> None:
    told = results(RUN).out(f"{mode}-{name}")
    named = re.findall(r"^train epoch 1: rank (\d) held the others up by .* s \(\d+%\): (.+) took ", told, flags=re.M)
    assert named == ([(str(PACES[name][1]), CAUSES[name])] if name in CAUSES else []), told
