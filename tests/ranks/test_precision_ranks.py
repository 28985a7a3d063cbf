"""Half precision on several ranks of a real job, with both frameworks: the same loss, the same scale, the same weights."""

import json
from functools import partial
from pathlib import Path

import numpy
import pytest
from launching import TOY, hvdtrain
from trainings import Results, ResultsOf, Run, Trained, assert_same, trains

RUNS = [Run("torch", "horovod", 1), Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)]

FLOAT16 = {"mixed_precision": "float16", "grad_scaler": {"init_scale": 1024.0, "growth_interval": 8}, "losses": "mean"}
OVERFLOW = {**FLOAT16, "fault": "overflow,{last},3,12"}  # on the last rank only, in two of 20 steps
APART = {"horovod_reduce_type": "param", "horovod_param_sync_step": 7}

TRAININGS: dict[str, dict[str, object]] = {
    "float32": {"losses": "mean", "num_epochs": 3},
    "bfloat16": {"losses": "mean", "num_epochs": 3, "mixed_precision": "bfloat16"},
    "float16": {**FLOAT16, "num_epochs": 3},
    "accumulated": {"losses": "several", "num_epochs": 3, "accum_grad_multiple_step": 2},
    "accumulated_float16": {**FLOAT16, "losses": "several", "num_epochs": 3, "accum_grad_multiple_step": 2},
    "overflow": OVERFLOW,
    "whole": {**FLOAT16, "num_epochs": 2},
    "stopped": {**FLOAT16, "num_epochs": 2, "fault": "SIGTERM,{last},3,18,24"},
    "whole_apart": {**OVERFLOW, **APART, "num_epochs": 2},
    "parts_apart": {**OVERFLOW, **APART, "num_epochs": 1, "saved_as": "apart"},
    "rest_apart": {**OVERFLOW, **APART, "num_epochs": 2, "saved_as": "apart"},
}

SENT = {"losses": "mean", "num_epochs": 3, "horovod_compression": "fp16", "grad_scaler": {"init_scale": 64.0}}
OF_SEVERAL: dict[str, dict[str, object]] = {"sent": {**SENT, "fault": "overflow,{last},3,12"}}
APART_IN_16_BITS = {"sent_apart": {**APART, "losses": "mean", "num_epochs": 3, "horovod_compression": "fp16"}}
"""Of several ranks: gradients in float32, or the changes of parameters, travel in float16."""


@trains(*RUNS)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made = {}
    of_several = OF_SEVERAL | (APART_IN_16_BITS if run.framework == "torch" else {}) if run.size > 1 else {}
    for name, given in (TRAININGS | of_several).items():
        if name in ("whole", "stopped") and run.framework == "tensorflow":
            continue  # it traces its graphs anew after every stop; test_update_together.py stops it in half precision
        made[name] = {"evaluated": True, "record": True, "log": folder / f"{name}.log", **given}
        if "fault" in given:
            made[name]["fault"] = str(given["fault"]).format(last=run.size - 1)
    return made


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


def loss_scales(results: Results, name: str, rank: int) -> list[str]:
    """What a rank's log says of the loss scale."""
    size = results.run.size
    log = results.needed(f"{name}.log" if size == 1 else f"{name}.horovod-{rank}-{size}.log").read_text()
    return [line for line in log.splitlines() if line.startswith("loss scale")]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_half_precision_learns_about_what_single_precision_learns(results: ResultsOf, run: Run) -> None:
    made = results(run)
    losses = {name: made.scores(name)[-1]["dev_loss_ce"] for name in ("float32", "bfloat16", "float16")}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["float16"] == pytest.approx(losses["float32"], rel=0.02)
    assert len(set(losses.values())) == 3  # something was computed otherwise
    for name in losses:
        assert all(values.dtype in (numpy.float32, numpy.int32, numpy.int64) for values in made.weights(name).values())
        for rank in range(1, run.size):
            assert_same(made.weights(name), made.weights(name, rank))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_accumulated_gradients_are_scaled_and_unscaled_alike(results: ResultsOf, run: Run) -> None:
    single, half = (results(run).scores(name)[-1] for name in ("accumulated", "accumulated_float16"))
    assert half["dev_loss_ce"] == pytest.approx(single["dev_loss_ce"], rel=0.02)
    assert half["dev_loss_ce"] != single["dev_loss_ce"]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_overflow_on_one_rank_leaves_the_update_out_on_all(results: ResultsOf, run: Run) -> None:
    made = results(run)
    told = loss_scales(made, "overflow", 0)
    why = ": a gradient is not finite, the update is skipped"
    assert told == [
        f"loss scale 512 from step 4 of the training on{why}",
        "loss scale 1024 from step 12 of the training on",
        f"loss scale 512 from step 13 of the training on{why}",
    ]
    assert made.reports("overflow")[-1]["loss_scale"] == 512.0
    assert "loss_scale" not in made.reports("float32")[-1]
    for rank in range(1, run.size):
        assert told == loss_scales(made, "overflow", rank)
        assert_same(made.weights("overflow"), made.weights("overflow", rank))


@pytest.mark.parametrize("run", [run for run in RUNS if run.size == 2], ids=str)
def test_gradients_that_travel_in_float16_teach_the_same_and_an_overflow_skips_the_update(results: ResultsOf, run: Run) -> None:
    made = results(run)
    skipped = [f"loss scale {scale} from step {step} of the training on" for scale, step in ((32, 4), (16, 13))]
    why = ": a gradient is not finite, the update is skipped"
    for rank in range(2):
        assert loss_scales(made, "sent", rank) == [line + why for line in skipped]
    assert_same(made.weights("sent"), made.weights("sent", 1))
    assert "gradients are summed for every update, sent in float16" in made.out("sent")
    losses = [made.scores(name)[-1]["dev_loss_ce"] for name in ("float32", "sent")]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]


def test_changes_of_parameters_that_travel_in_float16_teach_about_the_same(results: ResultsOf) -> None:
    made = results(Run("torch", "horovod", 2))
    assert_same(made.weights("sent_apart"), made.weights("sent_apart", 1))
    assert made.scores("sent_apart")[-1]["dev_loss_ce"] == pytest.approx(made.scores("float32")[-1]["dev_loss_ce"], rel=0.1)
    assert "loss_scale" not in made.reports("sent_apart")[-1]


@pytest.mark.parametrize("run", [run for run in RUNS if run.size == 2], ids=str)
def test_ranks_that_update_alone_have_separate_scales(results: ResultsOf, run: Run) -> None:
    left_out = [sum("is skipped" in line for line in loss_scales(results(run), "parts_apart", rank)) for rank in range(2)]
    assert left_out == [0, 2]
    assert_same(results(run).weights("parts_apart"), results(run).weights("parts_apart", 1))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_training_that_goes_on_goes_on_with_its_scale(results: ResultsOf, run: Run) -> None:
    made = results(run)
    pairs = [("whole_apart", "rest_apart"), ("whole", "stopped")]
    for whole, stopped in pairs if run.framework == "torch" else pairs[:1]:
        for rank in range(run.size):
            assert_same(made.weights(whole, rank), made.weights(stopped, rank))
        assert made.reports(whole)[-1]["loss_scale"] == made.reports(stopped)[-1]["loss_scale"]
    assert made.reports("float16")[-1]["loss_scale"] > 2048.0


def test_returnns_names_are_understood_and_mistakes_are_reported_before_training(corpus: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"corpus": corpus, "model": tmp_path / "model", "part": "two.hdf"}
    finished = hvdtrain(TOY, {**keys, "torch_amp": {"dtype": "float16", "grad_scaler": {"init_scale": 2.0}}})
    assert finished.status == 0, finished.err
    assert json.loads((tmp_path / "scores.jsonl").read_text())["loss_scale"] == 2.0
    finished = hvdtrain(TOY, {**keys, "mixed_precision": "float8", "grad_scaler": {"grow": 2}})
    assert finished.status == 2
    assert "mixed_precision: expected 'bfloat16' or 'float16', got 'float8'" in finished.err
    assert "grad_scaler.grow: expected one of init_scale" in finished.err
