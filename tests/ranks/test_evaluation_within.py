"""Evaluations within epochs: exact on all ranks, without an effect on the training, and the same after a stop."""

from pathlib import Path

import pytest
from trainings import Run, Trained, Trainings, assert_same, trains

ONE, TWO, TENSORFLOW = Run("torch", "horovod", 1), Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)

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
}

ENDING: dict[str, object] = {
    "early_stopping_patience": 2,
    "early_stopping_min_difference": 9.0,
    "eval_interval_for": ["early_stopping"],
}
"""The third evaluation ends the epoch, and with it the training."""


STOPS = {"fault": "SIGTERM,1,5,28", "save_interval_steps": 8}
"""Within an evaluation, and before one."""


def in_two_ways(name: str) -> dict[str, dict[str, object]]:
    """Without evaluations within epochs, and with them."""
    base = {"num_epochs": 2, "evaluated": True, "record": True, **TRAININGS[name]}
    return {f"{name}.without": base, f"{name}.within": base | WITHIN}


@trains(ONE, TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made: dict[str, dict[str, object]] = {"plain.within": {"evaluated": True, **WITHIN}}
    if run == TWO:
        made |= in_two_ways("statistics")  # test_phases.py stops them
        made["ended"] = {"num_epochs": 5, "evaluated": True, **WITHIN, **ENDING}
        made["ended.stopped"] = made["ended"] | {"fault": "SIGTERM,1,17"}
    return made


@trains(slow=[TWO, TENSORFLOW])
def more_trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made = in_two_ways("param" if run == TWO else "statistics")
    return (
        made | {"param.stopped": made["param.within"] | STOPS} if run == TWO else {"statistics.within": made["statistics.within"]}
    )


@pytest.mark.parametrize(
    ("function", "name"), [(trainings, "statistics"), pytest.param(more_trainings, "param", marks=pytest.mark.slow)]
)
def test_the_training_is_bit_equal_to_one_without_and_a_stop_within_an_evaluation_repeats_it(
    trained: Trained, function: Trainings, name: str
) -> None:
    made = trained(function, TWO)
    for other in ("within", "stopped") if function is more_trainings else ("within",):
        for rank in range(2):
            assert_same(made.weights(f"{name}.without", rank), made.weights(f"{name}.{other}", rank))
            assert made.needed(f"{name}.without.ids.{rank}").read_text() == made.needed(f"{name}.{other}.ids.{rank}").read_text()
        assert made.scores(f"{name}.without") == made.scores(f"{name}.{other}")
    whole = made.evaluations(f"{name}.within")
    places = [(one["epoch"], one["step"], one["global_step"]) for one in whole]
    assert places == [(1, 6, 6), (1, 12, 12), (1, 18, 18), (2, 4, 24), (2, 10, 30), (2, 16, 36)]
    if function is more_trainings:
        assert whole == made.evaluations(f"{name}.stopped")
        assert made.out(f"{name}.stopped").count("stopped by SIGTERM in epoch") == 2, made.out(f"{name}.stopped")


def test_a_stop_within_the_evaluation_that_ends_an_epoch_changes_no_bit(trained: Trained) -> None:
    made = trained(trainings, TWO)
    assert_same(made.weights("ended"), made.weights("ended.stopped"))
    assert made.scores("ended") == made.scores("ended.stopped")
    assert [report["steps"] for report in made.reports("ended.stopped")] == [18]
    out = made.out("ended.stopped")
    assert "stopped by SIGTERM in epoch 1 after step 18" in out
    assert "epoch 1 ends after step 18" in out.split("stopped by SIGTERM")[1], "the stop came before the end was decided"


def test_any_number_of_ranks_has_the_same_scores(trained: Trained) -> None:
    one, two = (trained(trainings, run).evaluations("plain.within") for run in (ONE, TWO))
    assert len(one) == 3
    for alone, together in zip(one, two, strict=True):
        assert alone["progress"] == together["progress"]
        for name in ("dev_loss_ce", "dev_loss_fer"):
            assert alone["scores"][name] == pytest.approx(together["scores"][name], rel=1e-4)


@pytest.mark.slow
def test_both_frameworks_evaluate_within_epochs(trained: Trained) -> None:
    made = trained(more_trainings, TENSORFLOW).evaluations("statistics.within")
    assert [one["global_step"] for one in made] == [6, 12, 18, 24, 30, 36]
    scores = [one["scores"]["dev_loss_ce"] for one in made]
    assert scores[-1] < scores[0]
