"""RETURNN's networks: N ranks learn what one rank learns, number by number. The config is tests/toy/network_config.py."""

from functools import partial
from pathlib import Path

import numpy
import pytest
from trainings import ResultsOf, Run, Trained, assert_alike, assert_same, marked, trains

ALONE, TWO, THREE = (Run("tensorflow-net-dict", "single" if size == 1 else "horovod", size) for size in (1, 2, 3))
RUNS = [TWO, *marked([THREE])]

TRAININGS: dict[str, dict[str, object]] = {
    "sum": {"gradient_clip_global_norm": 50.0},
    "mean": {"losses": "mean", "gradient_clip_global_norm": 1.0},
    "several": {"losses": "several"},
    "several_accumulated": {"losses": "several", "accum_grad_multiple_step": 2, "part": "even.hdf"},
    "per_rank": {"losses": "mean", "objective_per_rank": True, "optimizer": {"class": "gradientdescent"}, "part": "even.hdf"},
    "mean_accumulated": {"losses": "mean", "accum_grad_multiple_step": 2, "part": "even.hdf"},
    "rows": {"layers": "embedding", "optimizer": {"class": "momentum", "momentum": 0.9}, "learning_rate": 0.001},
    "param_every_7": {"horovod_reduce_type": "param", "horovod_param_sync_step": 7, "num_epochs": 2, "layers": "statistics"},
    "first_shared": {"horovod_reduce_type": "param", "horovod_param_sync_step": 3, "horovod_param_start": 5},
    "half": {"horovod_compression": "fp16"},
    "evaluated": {"learning_rate": 0.0, "evaluated": True, "losses": "several", "max_seqs": 7},
    "fewer_than_ranks": {"part": "two.hdf", "max_seqs": 1, "losses": "several", "num_epochs": 3},
    "whole": {"layers": "statistics", "num_epochs": 3},
    "first_part": {"layers": "statistics", "num_epochs": 1, "saved_as": "parts"},
    "second_part": {"layers": "statistics", "num_epochs": 3, "saved_as": "parts"},
    "stopped": {"layers": "statistics", "num_epochs": 3, "stop_at": 7},
}

COMPARED = ("sum", "mean", "several", "several_accumulated", "mean_accumulated", "rows")
"""What is compared with one rank."""


@trains(ALONE, TWO, again=[THREE])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made = {name: {"watchdog_timeout": 150, **given} for name, given in TRAININGS.items()}
    if run.size == 1:
        made = {name: made[name] for name in (*COMPARED, "evaluated", "whole", "first_part", "second_part", "stopped")}
        # the same global batches in twice as many steps, or in the same number of them
        made |= {
            f"{name}_in_halves": {**made[name], "max_seqs": 6, "accum_grad_multiple_step": 4} for name in ("several_accumulated",)
        }
        made |= {f"per_rank_{size}": {**TRAININGS["per_rank"], "learning_rate": 0.01 * size} for size in (1, 2, 3)}
    return made


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("name", COMPARED)
def test_weights_and_scores_do_not_depend_on_the_number_of_ranks(results: ResultsOf, run: Run, name: str) -> None:
    assert_alike(results(ALONE).weights(name), results(run).weights(name), 2e-5)
    assert results(run).scores(name)[-1] == pytest.approx(results(ALONE).scores(name)[-1], rel=1e-5)


def test_an_update_does_not_depend_on_the_number_of_batches_that_it_takes(results: ResultsOf) -> None:
    whole, halves = (results(ALONE).weights(name) for name in ("several_accumulated", "several_accumulated_in_halves"))
    assert_alike({**whole, "global_step": numpy.zeros(1)}, {**halves, "global_step": numpy.zeros(1)}, 2e-5)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_objective_of_every_rank_can_be_summed_as_it_is(results: ResultsOf, run: Run) -> None:
    """As in RETURNN: the ranks' means and constraints are summed. One rank gets nearly the same with the rate times the ranks."""
    alone, several = results(ALONE).weights(f"per_rank_{run.size}"), results(run).weights("per_rank")
    first = results(ALONE).weights("per_rank_1")
    changed = {name for name in several if not numpy.allclose(several[name], first[name], rtol=1e-4)}
    assert {"conv/W", "output/W"} <= changed
    assert numpy.abs(several["conv/W"] - alone["conv/W"]).max() < 0.2 * numpy.abs(several["conv/W"] - first["conv/W"]).max()


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_all_ranks_end_with_the_same_model(results: ResultsOf, run: Run) -> None:
    for name in results(run).names:
        first = results(run).weights(name)
        for rank in range(1, run.size):
            assert_same(first, results(run).weights(name, rank))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_evaluation_gives_the_same_numbers_on_any_number_of_ranks(results: ResultsOf, run: Run) -> None:
    one, several = results(ALONE).scores("evaluated")[-1], results(run).scores("evaluated")[-1]
    dev = {name: value for name, value in one.items() if name.startswith("dev_")}
    assert set(dev) == {
        "dev_loss_score_output",
        "dev_loss_error_output",
        "dev_loss_score_other",
        "dev_loss_error_other",
        "dev_loss_total",
    }
    assert dev == pytest.approx({name: several[name] for name in dev}, rel=1e-7)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_gradients_in_16_bits_and_post_local_updates_train(results: ResultsOf, run: Run) -> None:
    exact, half, local = (results(run).weights(name) for name in ("sum", "half", "first_shared"))
    assert not numpy.array_equal(exact["output/W/W"] if "output/W/W" in exact else exact["output/W"], half["output/W"])
    assert results(run).scores("half")[-1]["train_loss_score"] == pytest.approx(
        results(run).scores("sum")[-1]["train_loss_score"], rel=0.05
    )
    assert not numpy.array_equal(local["output/W"], exact["output/W"])


@pytest.mark.parametrize("run", [ALONE, *RUNS], ids=str)
def test_three_epochs_in_one_go_or_in_two(results: ResultsOf, run: Run) -> None:
    """Bit for bit, dropout and batch normalization included."""
    compare = assert_same if run.size < 3 else lambda one, other: assert_alike(one, other, 1e-5)
    compare(results(run).weights("whole"), results(run).weights("second_part"))
    compare(results(run).weights("whole"), results(run).weights("stopped"))
    assert "stopped by SIGUSR1 in epoch 1 after step " in results(run).out("stopped")
    assert "training goes on after epoch 1, step 20." in results(run).out("second_part")
