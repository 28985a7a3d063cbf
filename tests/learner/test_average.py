"""The average of the weights over time: what it is, who uses it, and that it outlives stops."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from launching import hvdtrain
from learners import batch_of, learner_of
from trainings import CONFIGS, Results, ResultsOf, Run, Trained, assert_same, marked, saved_model, trains

from hvdtrain.context import get_run_ctx
from hvdtrain.learner.weight_average import retained_share

SUFFIX = {"torch": "pt", "tensorflow": "npz"}
ALONE, TWO, OF_TENSORFLOW = Run("torch", "horovod", 1), Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)
RUNS = [TWO, *marked([OF_TENSORFLOW], pytest.mark.slow)]

BATCH = batch_of(numpy.ones((1, 1, 1), numpy.float32))


def learner(decay: float) -> Any:
    """One weight, 8 at first; an update with the rate 0.5 halves it, twice the rate makes it zero."""

    def get_model(**_: Any) -> torch.nn.Module:
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(layer.weight, 8.0)
        return layer

    def train_step(*, model: torch.nn.Module, **_: Any) -> None:
        get_run_ctx().mark_as_loss(model.weight.square().sum() / 2, "half_square")

    return learner_of(get_model, train_step, ema_decay=decay)


def test_it_follows_the_weights_and_evaluation_uses_it(tmp_path: Path) -> None:
    made = learner(0.2)
    made.begin_epoch(1, 0)
    expected = weight = 8.0
    for number in range(4):
        made.backward(BATCH)
        made.update(0.5)
        made.state.average_weights(1)
        weight /= 2
        decay = min(0.2, (1 + number) / (10 + number))  # 0.1, 0.18, 0.2, 0.2
        expected = decay * expected + (1 - decay) * weight
    assert made.model.weight.item() == weight
    made.meter.take_scores()
    with made.state.averaged_weights():
        made.evaluate(BATCH)
        with made.state.averaged_weights():  # entered twice, it changes nothing
            made.evaluate(BATCH)
        made.evaluate(BATCH)
        assert made.meter.take_scores().means() == {"half_square": pytest.approx(expected**2 / 2)}
        with made.state.trained_weights():
            made.state.contents({}).write(tmp_path / "within.pt", tmp_path / "within.opt.pt")
        assert made.model.weight.item() == pytest.approx(expected)
    assert made.model.weight.item() == weight
    made.state.contents({"epoch": 1}).write(tmp_path / "model.pt", tmp_path / "model.opt.pt")
    for name in ("within", "model"):  # the same, whether or not an evaluation is under way
        assert torch.load(tmp_path / f"{name}.pt")["model"]["weight"].item() == pytest.approx(expected)
        assert torch.load(tmp_path / f"{name}.opt.pt")["trained"]["weight"].item() == weight
    gone_on = learner(0.2)
    gone_on.state.load(tmp_path / "model.pt", tmp_path / "model.opt.pt")
    gone_on.begin_epoch(2, 4)
    assert gone_on.model.weight.item() == weight
    for each in (made, gone_on):
        each.backward(BATCH)
        each.update(0.5)
        each.state.average_weights(1)
    with made.state.averaged_weights(), gone_on.state.averaged_weights():
        assert torch.equal(made.model.weight, gone_on.model.weight)


def test_several_updates_at_once_look_back_as_far_as_one_by_one() -> None:
    assert retained_share(0.9, 0, 5) == pytest.approx(retained_share(0.9, 0, 2) * retained_share(0.9, 2, 3))
    assert retained_share(0.999, 10**6, 100) == pytest.approx(0.999**100)


KEYS = {"layers": "statistics", "evaluated": True, "num_epochs": 2, "optimizer": {"class": "adam"}, "ema_decay": 0.9}
PARAM = {"horovod_reduce_type": "param", "horovod_param_sync_step": 7}


@trains(TWO, slow=[OF_TENSORFLOW])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """tests/ranks/test_phases.py stops trainings whose ranks update alone."""
    common = {**KEYS, "record": True, "parts": 2}  # epochs of 10 steps
    stops = {"fault": "SIGTERM,0,3,9,13" if run.framework == "torch" else "SIGTERM,0,9"}  # TensorFlow traces anew after each
    preload = {"filename": str(folder / f"whole/model.002.{SUFFIX[run.framework]}"), "init_for_train": True}
    made = {
        "plain": {**common, "ema_decay": None},
        "whole": common,
        "background": {**common, **stops, "save_in_background": True, "cleanup_old_models": {"keep_last_n": 1, "keep_best_n": 0}},
        "preloaded": {**common, "preload_from_files": {"all": preload}, "learning_rate": 0.0, "num_epochs": 1},
    }
    return made | ({"param": {**common, **PARAM}} if run.framework == "torch" else {})


@trains(ALONE)
def seldom(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"each": KEYS, "seldom": {**KEYS, **PARAM}}


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


def saved(results: Results, name: str, epoch: int = 2) -> dict[str, numpy.ndarray]:
    """The model in a checkpoint."""
    return saved_model(results.models[name], epoch)


def dev_scores(results: Results, name: str) -> list[float]:
    return [scores["dev_loss_ce"] for scores in results.scores(name)]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_training_does_not_change_but_what_is_evaluated_and_saved_does(results: ResultsOf, run: Run) -> None:
    made = results(run)
    for rank in range(run.size):
        assert_same(made.weights("plain", rank), made.weights("whole", rank))
    plain, average = saved(made, "plain"), saved(made, "whole")
    first = "first.weight" if run.framework == "torch" else "first.kernel"
    assert 0 < numpy.abs(plain[first] - average[first]).max() < 0.2
    frozen = "frozen" if run.framework == "torch" else "frozen.kernel"
    assert numpy.array_equal(plain[frozen], average[frozen])
    assert plain.keys() == average.keys()
    assert dev_scores(made, "plain") != dev_scores(made, "whole")


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_stops_change_neither_weights_nor_average(results: ResultsOf, run: Run) -> None:
    made = results(run)
    told = re.findall(r"stopped by SIGTERM in epoch \d (.*); the same", made.out("background"))
    assert any("in the evaluation" in one for one in told)  # while the model has the average as its weights
    for rank in range(run.size):
        assert_same(made.weights("whole", rank), made.weights("background", rank))
    assert_same(saved(made, "whole"), saved(made, "background"))
    assert dev_scores(made, "whole") == dev_scores(made, "background")
    for name in made.names:
        assert_same(made.weights(name), made.weights(name, run.size - 1))
    files = made.models["background"].parent.glob("model.*")
    left = [path.name for path in files if ".opt." not in path.name and "rank" not in path.name]
    assert left == [f"model.002.{SUFFIX[run.framework]}"]


def test_where_ranks_sync_seldom_it_looks_back_as_far(trained: Trained) -> None:
    """In one process an average after every 7 updates and one after each are of the same weights, and close to each other."""
    made = trained(seldom, ALONE)
    assert_same(made.weights("each"), made.weights("seldom"))
    last = made.weights("each")
    for name in ("first.weight", "last.weight"):
        lag = numpy.abs(saved(made, "each")[name] - last[name]).mean()
        assert 0.3 * lag < numpy.abs(saved(made, "seldom")[name] - last[name]).mean() < 1.5 * lag


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_it_begins_with_preloaded_weights(results: ResultsOf, run: Run) -> None:
    preloaded, average = saved(results(run), "preloaded", epoch=1), saved(results(run), "whole")
    for name in average:
        if "norm" not in name and "batches" not in name:  # statistics continue
            assert numpy.allclose(preloaded[name], average[name], rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_another_task_and_another_number_of_ranks_go_on_with_it(corpus: Path, results: ResultsOf, run: Run) -> None:
    made = results(run)
    keys = {**KEYS, "corpus": corpus, "parts": 2}
    evaluated = hvdtrain(CONFIGS[run.framework], {**keys, "model": made.models["whole"], "task": "eval"})
    found = re.search(r"epoch 2 evaluation: dev: ce ([0-9.]+)", evaluated.out)
    assert found is not None, evaluated.out + evaluated.err
    assert float(found.group(1)) == pytest.approx(dev_scores(made, "whole")[-1], rel=1e-3)
    if run.framework == "tensorflow":
        return  # a process of its own, for what is no framework's own
    gone_on = hvdtrain(CONFIGS[run.framework], {**keys, "model": made.models["param"], "num_epochs": 3})
    assert gone_on.status == 0, gone_on.err
    assert len(dev_scores(made, "param")) == 3
    before, after = saved(made, "param", 2), saved(made, "param", 3)
    assert any(not numpy.array_equal(before[name], after[name]) for name in before)
