"""RETURNN's networks that change with the epoch: equal to RETURNN's engine on one rank, the same on several, also after stops."""

import re
from functools import partial
from pathlib import Path

import pytest
from launching import TOY, launch
from trainings import ResultsOf, Run, Trained, assert_alike, assert_same, marked, trains

pytestmark = pytest.mark.slow

CONFIGS = [TOY.with_name("network_config.py"), TOY.with_name("growing_config.py")]
ALONE, TWO = (Run("tensorflow-net-dict", "single" if size == 1 else "horovod", size) for size in (1, 2))
AVERAGED = {
    "horovod_reduce_type": "param",
    "horovod_param_sync_step": 5,
    "horovod_param_sync_parts": 2,
    "horovod_param_outer": {"class": "nesterov", "momentum": 0.5},
}


WHOLE: dict[str, object] = {"configs": CONFIGS, "evaluated": True, "watchdog_timeout": 150}


@trains(slow=[ALONE, TWO])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return {"whole": WHOLE}


@trains(again=[TWO])
def stopped(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """In epoch 1, whose batches are of frames, in epoch 3, whose network has a new layer, and between two epochs."""
    made = {"whole": WHOLE, "averaged": WHOLE | AVERAGED}
    stops = {f"{name}_stopped": given | {"stop_after": "30,85"} for name, given in made.items()}
    return made | stops | {f"until_{epoch}": WHOLE | {"num_epochs": epoch, "saved_as": "parts"} for epoch in (2, 5)}


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


def test_two_ranks_learn_what_one_does(results: ResultsOf) -> None:
    assert_alike(results(ALONE).weights("whole"), results(TWO).weights("whole"), 1e-4)
    for one, two in zip(results(ALONE).reports("whole"), results(TWO).reports("whole"), strict=True):
        for name, score in one["scores"].items():  # a frame whose two best classes are almost equal may change sides
            tolerance: dict[str, float] = {"abs": 0.002} if "error" in name else {"rel": 2e-5}
            assert two["scores"][name] == pytest.approx(score, **tolerance)
        assert two["learning_rate"] == one["learning_rate"]
        assert (one["padding"]["data"] == 0.0) == (one["epoch"] <= 2)


@pytest.mark.parametrize("run", marked([TWO]), ids=str)
def test_a_stop_changes_no_bit(trained: Trained, run: Run) -> None:
    results = trained(stopped, run)
    for name, other in (("whole", "whole_stopped"), ("averaged", "averaged_stopped"), ("whole", "until_5")):
        for epoch in (1, 3) if "stopped" in other else ():
            assert f"stopped by SIGUSR1 in epoch {epoch} after step " in results.out(other)
        assert results.scores(name) == results.scores(other)
        for rank in range(run.size):
            assert_same(results.weights(name, rank), results.weights(other, rank))
    assert results.scores("averaged")[-1]["dev_loss_score"] < 1.55


SCORES = re.compile(r"^(?:pretrain )?epoch \d+ score: (\S+) error: (\S+)|^dev: score (\S+) error (\S+)", re.MULTILINE)
RATES = re.compile(r"^start (?:pretrain )?epoch \d+ with learning rate (\S+)", re.MULTILINE)


def models_in(folder: Path) -> list[str]:
    """The files by which a model is found."""
    return sorted(path.name for path in folder.glob("*.index"))


def test_epochs_are_those_of_returnns_engine(results: ResultsOf, corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "evaluated": "True", "log_verbosity": 5}
    given = [text for name, value in keys.items() for text in (f"++{name}", value)]
    theirs = launch(["-m", "returnn", *CONFIGS, *given])
    assert theirs.status == 0, theirs.err[-3000:]
    numbers = [[float(number) for number in match if number] for match in SCORES.findall(theirs.out)]
    ours = results(ALONE).reports("whole")
    assert models_in(results(ALONE).models["whole"].parent) == models_in(tmp_path)
    assert [name for name in models_in(tmp_path) if "pretrain" not in name] == ["model.005.index"]
    names = ("train_loss_score", "train_loss_error"), ("dev_loss_score", "dev_loss_error")
    for (train, dev), line in zip(zip(numbers[::2], numbers[1::2], strict=True), ours, strict=True):
        for found, wanted in zip((train, dev), names, strict=True):
            assert [line["scores"][name] for name in wanted] == pytest.approx(found, rel=3e-6)
    assert [line["learning_rate"] for line in ours] == pytest.approx([float(rate) for rate in RATES.findall(theirs.out)])
