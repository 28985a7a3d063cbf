"""Everything that may happen to a gradient at once: several batches, half precision with a scale, noise, clipping, an average."""

from functools import partial
from pathlib import Path

import numpy
import pytest
from trainings import ResultsOf, Run, Trained, assert_same, saved_model, trains

RUNS = [Run(framework, "horovod", 2) for framework in ("torch", "tensorflow")]

TOGETHER: dict[str, object] = {
    "layers": "statistics",
    "losses": "several",
    "num_epochs": 2,
    "accum_grad_multiple_step": 3,
    "mixed_precision": "float16",
    "grad_scaler": {"init_scale": 2.0**18, "growth_interval": 3},  # the first updates overflow, and later ones now and then
    "gradient_noise": 0.01,
    "gradient_clip_global_norm": 1.0,
    "ema_decay": 0.9,
}


@trains(*RUNS)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made: dict[str, dict[str, object]] = {}
    for reduce in ("grad", "param"):
        made[f"{reduce}.whole"] = {"horovod_reduce_type": reduce, "horovod_param_sync_step": 2, "record": True, **TOGETHER}
        steps = "4,16,25" if run.framework == "torch" else "16"  # TensorFlow traces its graphs anew after a stop
        made[f"{reduce}.stopped"] = {**made[f"{reduce}.whole"], "fault": f"SIGTERM,0,{steps}"}
    return made


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_ranks_agree_and_a_stop_changes_nothing(results: ResultsOf, run: Run) -> None:
    made = results(run)
    for reduce in ("grad", "param"):
        assert made.out(f"{reduce}.stopped").count("stopped by SIGTERM") >= (2 if run.framework == "torch" else 1)
        first = made.weights(f"{reduce}.whole")
        assert all(numpy.isfinite(array.astype(float)).all() for array in first.values())
        for how in ("whole", "stopped"):
            for rank in (0, 1):
                assert_same(first, made.weights(f"{reduce}.{how}", rank))
        whole, stopped = (saved_model(made.models[f"{reduce}.{how}"], 2) for how in ("whole", "stopped"))
        assert_same(whole, stopped)  # the average of the weights
        assert any(not numpy.array_equal(array, first[name]) for name, array in whole.items())
    assert any("the update is skipped" in made.out(name) for name in made.names)
