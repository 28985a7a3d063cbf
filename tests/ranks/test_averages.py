"""Averages at the end of a training are the same on any number of ranks, in both frameworks, after stops, too."""

import json
from pathlib import Path

import numpy
import pytest
from trainings import ResultsOf, Run, Trained, Trainings, assert_alike, marked, read_model, saved_model, trains

from hvdtrain.plugins.average.running import RunningSums

ONE, TWO, TENSORFLOW = Run("torch", "horovod", 1), Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)
MORE = [Run("torch", "horovod", 3)]

KEYS: dict[str, object] = {
    "num_epochs": 3,
    "evaluated": True,
    "average_checkpoints": '[{"best": 2}, {"running": 2}]',
    "cleanup_old_models": "{'keep_last_n': 1, 'keep_best_n': 0, 'keep': []}",
    "running_average": 7,
}
PARAM = {"horovod_reduce_type": "param", "horovod_param_sync_step": 4}


STOPS = {"fault": "SIGTERM,1,5,26", "save_interval_steps": 9}


@trains(ONE, TWO, slow=[TENSORFLOW], again=MORE)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made: dict[str, dict[str, object]] = {"grad": KEYS}
    if run == TWO:
        made["grad.stopped"] = KEYS | STOPS
        normed = {"layers": "only_statistics", "average_checkpoints": '{"last": 2, "recompute_statistics": True}'}
        made["normed"] = KEYS | normed | {"num_epochs": 2}
    return made


@trains(slow=[TWO])
def apart(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"param": KEYS | PARAM, "param.stopped": KEYS | PARAM | STOPS}


def model_of(results: ResultsOf, run: Run, name: str, average: str) -> dict[str, numpy.ndarray]:
    results(run).out(name)  # fails with the error of the launch
    suffix = "pt" if run.framework == "torch" else "npz"
    return read_model(results(run).models[name].with_name(f"model.{average}.{suffix}"))


@pytest.mark.parametrize("run", [TWO, *marked(MORE)], ids=str)
@pytest.mark.parametrize("average", ["best-2", "running-2"])
def test_any_number_of_ranks_makes_the_same_averages(results: ResultsOf, run: Run, average: str) -> None:
    assert_alike(model_of(results, ONE, "grad", average), model_of(results, run, "grad", average), 1e-4)


@pytest.mark.parametrize("run", [ONE, TWO, *marked([TENSORFLOW], pytest.mark.slow)], ids=str)
def test_the_averages_are_those_of_the_epochs(results: ResultsOf, run: Run) -> None:
    """The running average over two epochs of 20 updates: five samples of every seventh update."""
    made = {one["name"]: one for one in json.loads(results(run).models["grad"].with_name("averages.json").read_text())}
    scores = [line["dev_loss_ce"] for line in results(run).scores("grad")]
    best = sorted(sorted(range(1, 4), key=lambda epoch: scores[epoch - 1])[:2])
    suffix = "pt" if run.framework == "torch" else "npz"
    assert made["best-2"]["of"] == [f"model.{epoch:03d}.{suffix}" for epoch in best]
    models = [saved_model(results(run).models["grad"], epoch) for epoch in best]
    average = model_of(results, run, "grad", "best-2")
    for name, values in average.items():
        expected = numpy.mean([model[name] for model in models], axis=0, dtype=numpy.float64)
        assert numpy.array_equal(values, expected.astype(values.dtype)), name
    sums = [RunningSums.read(results(run).models["grad"].with_name(f"model.{epoch:03d}.running.npz"))[0] for epoch in (1, 3)]
    assert [one.samples for one in sums] == [2, 8]
    running = model_of(results, run, "grad", "running-2")
    for name in sums[0].sums:
        assert numpy.array_equal(running[name], ((sums[1].sums[name] - sums[0].sums[name]) / 6).astype("float32"))


@pytest.mark.parametrize(("function", "name"), [(trainings, "grad"), pytest.param(apart, "param", marks=pytest.mark.slow)])
def test_stops_change_nothing(trained: Trained, function: Trainings, name: str) -> None:
    results = trained(function, TWO)
    results.out(f"{name}.stopped")
    folders = [results.models[which].parent for which in (name, f"{name}.stopped")]
    whole, stopped = (RunningSums.read(folder / "model.003.running.npz")[0] for folder in folders)
    assert (whole.samples, whole.updates) == (stopped.samples, stopped.updates)
    assert whole.samples == 8
    assert [key for key in whole.sums if not numpy.array_equal(whole.sums[key], stopped.sums[key])] == []
    texts = [(folder / "averages.json").read_text() for folder in folders]
    assert texts[0] == texts[1]


def test_the_training_goes_on_with_its_own_weights(results: ResultsOf) -> None:
    """The model after the averages were evaluated is that of the last epoch."""
    run = TWO
    model = saved_model(results(run).models["normed"], 2)
    for rank in range(run.size):
        weights = results(run).weights("normed", rank)
        assert [name for name in model if not numpy.array_equal(model[name], weights[name])] == []
    average = model_of(results, run, "normed", "last-2")
    assert not numpy.allclose(average["norm.running_mean"], model["norm.running_mean"])
