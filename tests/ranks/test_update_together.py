"""Everything that may happen to a gradient at once: several batches, half precision with a scale, noise, clipping, an average."""

import re
from pathlib import Path

import numpy
import pytest
from trainings import Results, Run, Trained, assert_same, saved_model, trains

TORCH, TENSORFLOW = (Run(framework, "horovod", 2) for framework in ("torch", "tensorflow"))

TOGETHER: dict[str, object] = {
    "layers": "statistics",
    "losses": "several",
    "accum_grad_multiple_step": 3,
    "mixed_precision": "float16",
    "grad_scaler": {"init_scale": 2.0**18, "growth_interval": 3},  # the first updates overflow, and later ones now and then
    "gradient_noise": 0.01,
    "gradient_clip_global_norm": 1.0,
    "ema_decay": 0.9,
}


def whole_and_stopped(run: Run, reduce: str) -> dict[str, dict[str, object]]:
    """TensorFlow traces its graphs anew after a stop."""
    epochs, steps = (2, "4,16,25") if run == TORCH else (1, "9")
    whole = {"horovod_reduce_type": reduce, "horovod_param_sync_step": 2, "num_epochs": epochs, "record": True, **TOGETHER}
    return {f"{reduce}.whole": whole, f"{reduce}.stopped": {**whole, "fault": f"SIGTERM,0,{steps}"}}


@trains(TORCH, TENSORFLOW)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """TensorFlow trains apart in test_exact_resume.py."""
    return whole_and_stopped(run, "grad") | (whole_and_stopped(run, "param") if run == TORCH else {})


@pytest.mark.parametrize("run", [TORCH, TENSORFLOW], ids=str)
def test_ranks_agree_and_a_stop_changes_nothing(trained: Trained, run: Run) -> None:
    made = trained(trainings, run)
    for whole, stopped in zip(made.names[::2], made.names[1::2], strict=True):
        check(made, whole, stopped)


def check(made: Results, whole: str, stopped: str) -> None:
    run = made.run
    steps = [int(step) for step in re.findall(r"stopped by SIGTERM in epoch \d after step (\d+);", made.out(stopped))]
    assert len(steps) >= (2 if run == TORCH else 1)
    assert all(step % 3 == 0 or step == 20 for step in steps), "a stop waits for an update of three batches, or of the last two"
    assert made.scores(whole) == made.scores(stopped)
    first = made.weights(whole)
    assert all(numpy.isfinite(array.astype(float)).all() for array in first.values())
    for name in (whole, stopped):
        for rank in (0, 1):
            assert_same(first, made.weights(name, rank))
            assert made.needed(f"{whole}.ids.{rank}").read_text() == made.needed(f"{name}.ids.{rank}").read_text()
        assert made.reports(name)[-1]["loss_scale"] == made.reports(whole)[-1]["loss_scale"]
    average, average_after_stops = (saved_model(made.models[name], 2 if run == TORCH else 1) for name in (whole, stopped))
    assert_same(average, average_after_stops)
    assert any(not numpy.array_equal(array, first[name]) for name, array in average.items())
    assert "the update is skipped" in made.out(whole)
