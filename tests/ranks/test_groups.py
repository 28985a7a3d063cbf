"""Groups of ranks that are one model, and are averaged: on four ranks.

tests/toy/collectives.py shows what both transports do between groups.
"""

from pathlib import Path

import pytest
from trainings import ResultsOf, Run, assert_alike, assert_same, marked, trains

pytestmark = pytest.mark.slow

FOUR = Run("torch", "horovod", 4)
AGAIN = [Run("torch", "torch.distributed", 4), Run("tensorflow", "horovod", 4)]
ALL = [FOUR, *marked(AGAIN)]

GROUPS: dict[str, object] = {"horovod_reduce_type": "param", "horovod_param_group": 2}
STOPPED: dict[str, object] = {
    **GROUPS,
    "horovod_param_sync_step": 6,
    "horovod_param_sync_delay": 4,
    "horovod_param_sync_parts": 2,
    "horovod_param_outer": {"class": "nesterov", "momentum": 0.5},
    "layers": "statistics",
    "losses": "mean",
    "optimizer": {"class": "adam"},
    "num_epochs": 2,
    "record": True,
}


# Two ranks to a group; 20 updates an epoch, in the last of which only one rank has a batch.
@trains(slow=[FOUR], again=AGAIN, apart=True)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    stopped = {**STOPPED, "horovod_compression": "int4" if run.framework == "torch" else "fp16"}
    steps = "4,25" if run.framework == "torch" else "16"  # TensorFlow traces its graphs anew after a stop
    made: dict[str, dict[str, object]] = {
        "every_step": {**GROUPS, "part": "even.hdf", "optimizer": {"class": "sgd"}},
        "gradients": {"horovod_avg_grad": True, "part": "even.hdf", "optimizer": {"class": "sgd"}},
        "every_7": {**GROUPS, "horovod_param_sync_step": 7, "losses": "several"},
        "fewer_than_ranks": {**GROUPS, "part": "two.hdf", "max_seqs": 1, "losses": "mean", "num_epochs": 2},
        "whole": stopped,
        "stopped": {**stopped, "fault": f"SIGTERM,3,{steps}"},
    }
    return {name: {"watchdog_timeout": 150, **given} for name, given in made.items()}


@pytest.mark.parametrize("run", ALL, ids=str)
def test_all_ranks_end_with_the_same_model(results: ResultsOf, run: Run) -> None:
    for name in results(run).names:
        for rank in range(1, run.size):
            assert_same(results(run).weights(name), results(run).weights(name, rank))


@pytest.mark.parametrize("run", ALL, ids=str)
def test_averaging_groups_after_every_sgd_step_is_averaging_gradients(results: ResultsOf, run: Run) -> None:
    assert_alike(results(run).weights("gradients"), results(run).weights("every_step"), 1e-5)


@pytest.mark.parametrize("run", ALL, ids=str)
def test_a_stop_changes_nothing(results: ResultsOf, run: Run) -> None:
    assert results(run).out("stopped").count("stopped by SIGTERM") == (2 if run.framework == "torch" else 1)
    assert_same(results(run).weights("whole"), results(run).weights("stopped"))
    counted = [[(line["syncs"], line["sent"]) for line in results(run).reports(name)] for name in ("whole", "stopped")]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("run", ALL, ids=str)
def test_bytes_within_and_between_groups_are_counted(results: ResultsOf, run: Run) -> None:
    [often], [seldom] = results(run).reports("every_step"), results(run).reports("every_7")
    assert (often["syncs"], seldom["syncs"]) == (often["steps"], 3)
    assert often["sent_between_groups"] * 3 == seldom["sent_between_groups"] * often["steps"]
    assert often["sent"] >= 2 * often["sent_between_groups"]  # also the gradients
    assert "of it between groups" in results(run).out("every_7")
    assert "gradients are averaged for every update within 2 groups of ranks; between groups, " in results(run).out("every_7")
    assert "sent_between_groups" not in results(run).reports("gradients")[0]
