"""Evaluations within epochs: exact on all ranks, without an effect on the training, and the same after a stop."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trainings import ResultsOf, Run, Trained, assert_same, trains

RUNS = [Run("torch", "horovod", 1), Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)]

WITHIN = {"eval_interval_steps": 6}
"""An epoch has 20 steps: after steps 6, 12, 18; 4, 10, 16 of the second."""

TRAININGS: dict[str, dict[str, object]] = {
    "statistics": {"layers": "statistics", "ema_decay": 0.9},
    "param": {
        "layers": "statistics",
        "horovod_reduce_type": "param",
        "horovod_param_sync_step": 7,
        "horovod_param_sync_delay": 3,
        "horovod_param_sync_parts": 2,
    },
    "plain": {},
}


ENDING: dict[str, object] = {
    "early_stopping_patience": 2,
    "early_stopping_min_difference": 9.0,
    "eval_interval_for": ["early_stopping"],
}
"""The third evaluation ends the epoch, and with it the training."""


def trainings_of(run: Run) -> dict[str, dict[str, object]]:
    names = {1: ["plain"], 2: list(TRAININGS)}[run.size] if run.framework == "torch" else ["statistics"]
    return {name: TRAININGS[name] for name in names}


@trains(*RUNS)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """Each without evaluations within epochs, with them, and with them and stops: two within evaluations, one before one."""
    made: dict[str, dict[str, object]] = {}
    for name, keys in trainings_of(run).items():
        base = {"num_epochs": 2, "evaluated": True, "record": True, **keys}
        made[f"{name}.within"] = base | WITHIN
        if run.framework == "torch" and run.size == 2:
            made[f"{name}.without"] = base
            made[f"{name}.stopped"] = base | WITHIN | {"fault": f"SIGTERM,{run.size - 1},5,22,28", "save_interval_steps": 8}
    if run == RUNS[1]:
        made["ended"] = {"num_epochs": 5, "evaluated": True, **WITHIN, **ENDING}
        made["ended.stopped"] = made["ended"] | {"fault": f"SIGTERM,{run.size - 1},17"}
    return made


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


def evaluations(results: ResultsOf, run: Run, name: str) -> list[dict[str, Any]]:
    results(run).out(name)
    lines = results(run).models[name].with_name("evaluations.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in ("elapsed", "seconds")} for line in lines]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_training_is_bit_equal_to_one_without(results: ResultsOf, name: str) -> None:
    run, made = RUNS[1], results(RUNS[1])
    for rank in range(run.size):
        for other in ("within", "stopped"):
            assert_same(made.weights(f"{name}.without", rank), made.weights(f"{name}.{other}", rank))
            assert made.needed(f"{name}.without.ids.{rank}").read_text() == made.needed(f"{name}.{other}.ids.{rank}").read_text()
    for other in ("within", "stopped"):
        assert made.scores(f"{name}.without") == made.scores(f"{name}.{other}")


@pytest.mark.parametrize("name", TRAININGS)
def test_a_stop_within_an_evaluation_repeats_it(results: ResultsOf, name: str) -> None:
    whole = evaluations(results, RUNS[1], f"{name}.within")
    assert whole == evaluations(results, RUNS[1], f"{name}.stopped")
    assert [(one["epoch"], one["step"], one["global_step"]) for one in whole] == [
        (1, 6, 6),
        (1, 12, 12),
        (1, 18, 18),
        (2, 4, 24),
        (2, 10, 30),
        (2, 16, 36),
    ]
    out = results(RUNS[1]).out(f"{name}.stopped")
    assert out.count("stopped by SIGTERM in epoch") == 3, out


def test_a_stop_within_the_evaluation_that_ends_an_epoch_changes_no_bit(results: ResultsOf) -> None:
    made = results(RUNS[1])
    assert_same(made.weights("ended"), made.weights("ended.stopped"))
    assert made.scores("ended") == made.scores("ended.stopped")
    assert [report["steps"] for report in made.reports("ended.stopped")] == [18]
    out = made.out("ended.stopped")
    assert "stopped by SIGTERM in epoch 1 after step 18" in out
    assert "epoch 1 ends after step 18" in out.split("stopped by SIGTERM")[1], "the stop came before the end was decided"


def test_any_number_of_ranks_has_the_same_scores(results: ResultsOf) -> None:
    one, two = (evaluations(results, run, "plain.within") for run in RUNS[:2])
    for alone, together in zip(one, two, strict=True):
        assert alone["progress"] == together["progress"]
        for name in ("dev_loss_ce", "dev_loss_fer"):
            assert alone["scores"][name] == pytest.approx(together["scores"][name], rel=1e-4)


def test_both_frameworks_evaluate_within_epochs(results: ResultsOf) -> None:
    assert [one["global_step"] for one in evaluations(results, RUNS[2], "statistics.within")] == [6, 12, 18, 24, 30, 36]
    scores = [one["scores"]["dev_loss_ce"] for one in evaluations(results, RUNS[2], "statistics.within")]
    assert scores[-1] < scores[0]
