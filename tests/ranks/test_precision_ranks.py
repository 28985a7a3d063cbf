"""Half precision on several ranks of a real job, with both frameworks: the same loss, the same scale, the same weights."""

import json
from pathlib import Path

import numpy
import pytest
from launching import TOY, hvdtrain
from trainings import Results, ResultsOf, Run, assert_same, marked, trains

TWO, TENSORFLOW = Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)
RUNS = [TWO, *marked([TENSORFLOW], pytest.mark.slow)]

FLOAT16 = {"mixed_precision": "float16", "grad_scaler": {"init_scale": 1024.0, "growth_interval": 8}, "losses": "mean"}
OVERFLOW = {**FLOAT16, "fault": "overflow,1,3,12"}  # on the last rank only, in two of 20 steps
APART = {"horovod_reduce_type": "param", "horovod_param_sync_step": 7}
ACCUMULATED = {"losses": "several", "accum_grad_multiple_step": 2, "num_epochs": 2}

TRAININGS: dict[str, dict[str, object]] = {
    "float32": {"losses": "mean"},
    "bfloat16": {"losses": "mean", "mixed_precision": "bfloat16"},
    "float16": FLOAT16,
    "accumulated": ACCUMULATED,
    "accumulated_float16": {**FLOAT16, **ACCUMULATED},
    "overflow": OVERFLOW,
    "apart": {**OVERFLOW, **APART},
    # gradients in float32, or the changes of parameters, travel in float16
    "sent": {
        "losses": "mean",
        "horovod_compression": "fp16",
        "grad_scaler": {"init_scale": 64.0},
        "fault": "overflow,1,3,12",
    },
    "sent_apart": {**APART, "losses": "mean", "horovod_compression": "fp16"},
}


@trains(TWO, slow=[TENSORFLOW])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """test_update_together.py stops trainings in half precision."""
    names = TRAININGS.keys() if run == TWO else ("float32", "float16", "overflow", "apart", "sent")
    return {
        name: {"evaluated": True, "log": folder / f"{name}.log", **given} for name, given in TRAININGS.items() if name in names
    }


def loss_scales(results: Results, name: str, rank: int) -> list[str]:
    """What a rank's log says of the loss scale."""
    log = results.needed(f"{name}.horovod-{rank}-2.log").read_text()
    return [line for line in log.splitlines() if line.startswith("loss scale")]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_half_precision_learns_about_what_single_precision_learns(results: ResultsOf, run: Run) -> None:
    """With accumulated gradients, which are scaled and unscaled alike, too."""
    made = results(run)
    pairs = [("float32", "bfloat16", "float16"), ("accumulated", "accumulated_float16")]
    for single, *half in pairs if run.framework == "torch" else [("float32", "float16")]:
        losses = {name: made.scores(name)[-1]["dev_loss_ce"] for name in (single, *half)}
        assert [losses[name] for name in half] == pytest.approx([losses[single]] * len(half), rel=0.02)
        assert len(set(losses.values())) == len(losses)  # something was computed otherwise
        for name in losses:
            assert all(values.dtype in (numpy.float32, numpy.int32, numpy.int64) for values in made.weights(name).values())
    for name in made.names:
        assert_same(made.weights(name), made.weights(name, 1))
    assert made.reports("float16")[-1]["loss_scale"] > 2048.0


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_overflow_on_one_rank_leaves_the_update_out_on_all(results: ResultsOf, run: Run) -> None:
    made = results(run)
    why = ": a gradient is not finite, the update is skipped"
    for rank in range(2):
        assert loss_scales(made, "overflow", rank) == [
            f"loss scale 512 from step 4 of the training on{why}",
            "loss scale 1024 from step 12 of the training on",
            f"loss scale 512 from step 13 of the training on{why}",
        ]
        assert loss_scales(made, "sent", rank) == [
            f"loss scale 32 from step 4 of the training on{why}",
            f"loss scale 16 from step 13 of the training on{why}",
        ]
    assert made.reports("overflow")[-1]["loss_scale"] == 512.0
    assert "loss_scale" not in made.reports("float32")[-1]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_gradients_and_changes_of_parameters_that_travel_in_float16_teach_about_the_same(results: ResultsOf, run: Run) -> None:
    made = results(run)
    said = "gradients are summed for every update, sent in float16 | 304 bytes each time | learning rates as in the config"
    assert said in made.out("sent")
    whole, sent = (made.scores(name)[-1]["dev_loss_ce"] for name in ("float32", "sent"))
    assert sent == pytest.approx(whole, rel=0.05)
    assert sent != whole
    if run.framework == "torch":
        assert made.scores("sent_apart")[-1]["dev_loss_ce"] == pytest.approx(whole, rel=0.1)
        assert "loss_scale" not in made.reports("sent_apart")[-1]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_ranks_that_update_alone_have_separate_scales(results: ResultsOf, run: Run) -> None:
    left_out = [sum("is skipped" in line for line in loss_scales(results(run), "apart", rank)) for rank in range(2)]
    assert left_out == [0, 2]


def test_returnns_names_are_understood_and_mistakes_are_reported_before_training(corpus: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"corpus": corpus, "model": tmp_path / "model", "part": "two.hdf"}
    finished = hvdtrain(TOY, {**keys, "torch_amp": {"dtype": "float16", "grad_scaler": {"init_scale": 2.0}}})
    assert finished.status == 0, finished.err
    assert json.loads((tmp_path / "scores.jsonl").read_text())["loss_scale"] == 2.0
    finished = hvdtrain(TOY, {**keys, "mixed_precision": "float8", "grad_scaler": {"grow": 2}})
    assert finished.status == 2
    assert "mixed_precision: expected 'bfloat16' or 'float16', got 'float8'" in finished.err
    assert "grad_scaler.grow: unknown key of a loss scale" in finished.err
