"""RETURNN's networks: N ranks learn what one rank learns, number by number. The config is tests/toy/network_config.py."""

import json
from functools import partial
from pathlib import Path

import numpy
import pytest
from launching import TOY
from trainings import CONFIGS, ResultsOf, Run, Trained, assert_alike, assert_same, marked, trains

pytestmark = pytest.mark.slow

ALONE, TWO, THREE = (Run("tensorflow-net-dict", "single" if size == 1 else "horovod", size) for size in (1, 2, 3))
RUNS = [TWO, *marked([THREE])]

FIVE_STEPS = {"part": "even.hdf", "parts": 4}
"""Of each epoch, in each of which 12 sequences are trained on."""

SEVERAL = {"losses": "several", "layers": "conv", "gradient_clip_global_norm": 1.0, "parts": 4}
BEST = {
    "num_epochs": 3,
    "evaluated": True,
    "learning_rates": [0.01, 5.0, 0.01],
    "use_last_best_model": True,
    "layers": "conv",
    **FIVE_STEPS,
}
WHOLE = {"layers": "conv_statistics", "num_epochs": 2, **FIVE_STEPS}

TRAININGS: dict[str, dict[str, object]] = {
    "sum": {"gradient_clip_global_norm": 50.0, "parts": 4},
    "several": SEVERAL,
    "several_accumulated": {"losses": "several", "accum_grad_multiple_step": 2, "layers": "conv", **FIVE_STEPS},
    "per_rank": {
        "losses": "mean",
        "objective_per_rank": True,
        "optimizer": {"class": "gradientdescent"},
        "layers": "conv",
        **FIVE_STEPS,
    },
    "rows": {"layers": "embedding", "optimizer": {"class": "momentum", "momentum": 0.9}, "learning_rate": 0.001, "parts": 4},
    "first_shared": {**WHOLE, "horovod_reduce_type": "param", "horovod_param_sync_step": 3, "horovod_param_start": 5},
    "half": {**SEVERAL, "horovod_compression": "fp16"},
    "evaluated": {"learning_rate": 0.0, "evaluated": True, "losses": "several", "max_seqs": 7, "layers": "conv", **FIVE_STEPS},
    "fewer_than_ranks": {"part": "two.hdf", "max_seqs": 1, "losses": "several", "num_epochs": 3},
    "best": BEST,
    "best_stopped": {**BEST, "stop_at": 12},
    "whole": WHOLE,
    "stopped": {**WHOLE, "stop_at": 2},
}
TRAININGS["scored"] = {**TRAININGS["evaluated"], "task": "eval", "saved_as": "evaluated"}

ATTENTION: dict[str, object] = {
    "configs": [CONFIGS["tensorflow-net-dict"], TOY.with_name("network_attention.py")],
    "part": "two.hdf",
}

COMPARED = ("sum", "several", "several_accumulated", "rows", "best")
"""What is compared with one rank."""


@trains(slow=[ALONE, TWO], again=[THREE])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made = {name: {"watchdog_timeout": 150, **given} for name, given in TRAININGS.items()}
    if run.size == 1:
        made = {name: made[name] for name in (*COMPARED, "evaluated", "scored")}
        # the same global batches in twice as many steps, or in the same number of them
        made["in_halves"] = {**made["several_accumulated"], "max_seqs": 6, "accum_grad_multiple_step": 4}
        made |= {
            f"per_rank_{size}": {**TRAININGS["per_rank"], "max_seqs": 12 // size, "accum_grad_multiple_step": size}
            for size in (2, 3)
        }
        made["attention"] = ATTENTION
        made["search"] = searching(folder, folder)
    elif run.size == 2:
        del made["fewer_than_ranks"]  # has two sequences
    return made


@trains(slow=[TWO], after=ALONE, again=[THREE])
def searches(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"search": searching(folder, folder.parent.parent / str(ALONE) / "networks.trainings")}


def searching(folder: Path, trained: Path) -> dict[str, object]:
    """A search with the model of one rank."""
    out = {"search_output_file": folder / "hypotheses.py", "search_output_file_format": "py"}
    return {**ATTENTION, **out, "task": "search", "search_data": "dev", "load": trained / "attention" / "model.001"}


@trains(again=[ALONE, TWO, THREE])
def parts(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """Two epochs in one training, in one that is stopped, and in two."""
    made = {name: {**TRAININGS[name], "watchdog_timeout": 150} for name in ("whole", "stopped")}
    return made | {
        "first": {**made["whole"], "num_epochs": 1, "saved_as": "parts"},
        "second": {**made["whole"], "saved_as": "parts"},
    }


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's arrays by name."""
    with numpy.load(file) as stored:
        return {name: stored[name].shape for name in stored.files if name != "progress"}


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("name", COMPARED)
def test_weights_and_scores_do_not_depend_on_the_number_of_ranks(results: ResultsOf, run: Run, name: str) -> None:
    assert_alike(results(ALONE).weights(name), results(run).weights(name), 2e-5)
    assert results(run).scores(name)[-1] == pytest.approx(results(ALONE).scores(name)[-1], rel=1e-5)


def test_an_update_does_not_depend_on_the_number_of_batches_that_it_takes(results: ResultsOf) -> None:
    whole, halves = (results(ALONE).weights(name) for name in ("several_accumulated", "in_halves"))
    assert_alike({**whole, "global_step": numpy.zeros(1)}, {**halves, "global_step": numpy.zeros(1)}, 2e-5)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_objective_of_every_rank_can_be_summed_as_it_is(results: ResultsOf, run: Run) -> None:
    """As in RETURNN: the ranks' means and constraints are summed, as one rank does with those of the same batches."""
    alone, several = results(ALONE).weights(f"per_rank_{run.size}"), results(run).weights("per_rank")
    assert_alike({**several, "global_step": alone["global_step"]}, alone, 2e-5)
    other = results(ALONE).weights(f"per_rank_{5 - run.size}")
    changed = {name for name in several if not numpy.allclose(several[name], other[name], rtol=1e-4)}
    assert {"conv/W", "output/W"} <= changed  # the number of ranks matters


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_all_ranks_end_with_the_same_model(results: ResultsOf, run: Run) -> None:
    for name in (name for name in results(run).names if name != "scored"):
        first = results(run).weights(name)
        for rank in range(1, run.size):
            assert_same(first, results(run).weights(name, rank))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_state_of_the_optimizer_is_that_of_any_number_of_ranks(results: ResultsOf, run: Run) -> None:
    """A training continues with other ranks, if the state has the same entries."""
    for name in ("sum", "several"):
        one, other = (shapes_in(results(of).models[name].with_name("model.001.opt.returnn.npz")) for of in (ALONE, run))
        assert one == other
        assert len(one) > 5


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
    del dev["dev_loss_total"]
    for ranks in (ALONE, run):
        assert json.loads(results(ranks).needed("scored.scores").read_text()) == pytest.approx(dev, rel=1e-7)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_search_on_several_ranks_finds_the_same_and_has_the_same_scores(results: ResultsOf, trained: Trained, run: Run) -> None:
    one, several = results(ALONE), trained(searches, run)
    scores, own = (json.loads(found.needed("search.scores").read_text()) for found in (one, several))
    assert scores["error"] > 0
    assert own == pytest.approx(scores, rel=1e-6)
    first, second = (eval(found.needed("hypotheses.py").read_text()) for found in (one, several))
    assert [*first] == [*second] == [f"seq-{number}" for number in range(101)]
    for tag, hypotheses in first.items():
        assert [text for _, text in hypotheses] == [text for _, text in second[tag]]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_gradients_in_16_bits_and_post_local_updates_train(results: ResultsOf, run: Run) -> None:
    weights = {name: results(run).weights(name)["output/W"] for name in ("several", "half", "whole", "first_shared")}
    assert not numpy.array_equal(weights["several"], weights["half"])
    assert results(run).scores("half")[-1]["train_loss_total"] == pytest.approx(
        results(run).scores("several")[-1]["train_loss_total"], rel=0.05
    )
    assert not numpy.array_equal(weights["first_shared"], weights["whole"])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_stop_within_an_epoch_changes_no_bit(results: ResultsOf, run: Run) -> None:
    """Dropout and batch normalization included."""
    compare = assert_same if run.size < 3 else lambda one, other: assert_alike(one, other, 1e-5)
    compare(results(run).weights("whole"), results(run).weights("stopped"))
    assert "stopped by SIGUSR1 in epoch 1 after step " in results(run).out("stopped")


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_epoch_begins_with_the_best_model_also_after_a_stop_in_it(results: ResultsOf, run: Run) -> None:
    compare = assert_same if run.size < 3 else lambda one, other: assert_alike(one, other, 1e-5)
    compare(results(run).weights("best"), results(run).weights("best_stopped"))
    line = "epoch 3 begins with the model of epoch 1 and a new optimizer: dev_loss_score "
    assert [results(run).out(name).count(line) for name in ("best", "best_stopped")] == [1, 1]
    assert "stopped by SIGUSR1 in epoch 3 after step " in results(run).out("best_stopped")


@pytest.mark.parametrize("run", marked([ALONE, TWO, THREE]), ids=str)
def test_nor_does_a_stop_between_two_epochs(trained: Trained, run: Run) -> None:
    compare = assert_same if run.size < 3 else lambda one, other: assert_alike(one, other, 1e-5)
    made = trained(parts, run)
    for name in ("stopped", "second"):
        compare(made.weights("whole"), made.weights(name))
    assert "training continues after epoch 1, step 5." in made.out("second")
