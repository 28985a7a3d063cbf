"""Half precision on several ranks of a real job, with both frameworks: the same loss, the same scale, the same weights."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import TOY, hvdtrain, launch

CONFIGS = {"torch": TOY, "tensorflow": TOY.with_name("tensorflow_config.py")}
RUNS = [("torch", 1), ("torch", 2), ("tensorflow", 1), ("tensorflow", 2)]
"""Framework and number of ranks."""

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
    "overflow_apart": {**OVERFLOW, **APART},
    "whole": {**FLOAT16, "num_epochs": 2},
    "stopped": {**FLOAT16, "num_epochs": 2, "fault": "SIGTERM,{last},3,18,24"},
    "whole_apart": {**OVERFLOW, **APART, "num_epochs": 2},
    "parts_apart": {**OVERFLOW, **APART, "num_epochs": 1, "saved_as": "apart"},
    "rest_apart": {**OVERFLOW, **APART, "num_epochs": 2, "saved_as": "apart"},
}


class Results:
    """A folder for each run, with what all its trainings left."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        self._corpus = corpus
        self._folder = folder

    def folder(self, run: tuple[str, int]) -> Path:
        framework, size = run
        folder = self._folder / f"{framework}-{size}"
        if not folder.exists():
            folder.mkdir()
            jobs = []
            for name, given in TRAININGS.items():
                keys: dict[str, object] = {"use_horovod": True, "corpus": self._corpus, "evaluated": True, **given}
                keys["model"] = folder / str(keys.pop("saved_as", name)) / "model"
                keys |= {"log": folder / f"{name}.log", "record": folder / f"{name}.ids"}
                texts = {key: str(value).replace("{last}", str(size - 1)) for key, value in keys.items()}
                jobs.append({"name": name, "folder": str(folder), "overrides": texts})
            (folder / "jobs.json").write_text(json.dumps(jobs))
            finished = launch([TOY.with_name("several.py"), folder / "jobs.json", CONFIGS[framework]], ranks=size, timeout=600)
            assert finished.status == 0, finished.err
        return folder

    def weights(self, run: tuple[str, int], name: str, rank: int = 0) -> dict[str, numpy.ndarray]:
        with numpy.load(self.folder(run) / f"{name}.rank-{rank}.npz") as stored:
            return dict(stored)

    def last(self, run: tuple[str, int], name: str) -> dict[str, Any]:
        return json.loads((self.folder(run) / name / "scores.jsonl").read_text().splitlines()[-1])

    def log(self, run: tuple[str, int], name: str, rank: int) -> str:
        file = f"{name}.log" if run[1] == 1 else f"{name}.horovod-{rank}-{run[1]}.log"
        return (self.folder(run) / file).read_text()


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(corpus, tmp_path_factory.mktemp("precision"))


def assert_same(one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not numpy.array_equal(one[name], other[name])] == []


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_half_precision_learns_about_what_single_precision_learns(results: Results, run: tuple[str, int]) -> None:
    losses = {name: results.last(run, name)["scores"]["dev_loss_ce"] for name in ("float32", "bfloat16", "float16")}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["float16"] == pytest.approx(losses["float32"], rel=0.02)
    assert len(set(losses.values())) == 3  # something was computed otherwise
    for name in losses:
        assert all(values.dtype in (numpy.float32, numpy.int32, numpy.int64) for values in results.weights(run, name).values())
        for rank in range(1, run[1]):
            assert_same(results.weights(run, name), results.weights(run, name, rank))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_accumulated_gradients_are_scaled_and_unscaled_alike(results: Results, run: tuple[str, int]) -> None:
    single, half = (results.last(run, name)["scores"] for name in ("accumulated", "accumulated_float16"))
    assert half["dev_loss_ce"] == pytest.approx(single["dev_loss_ce"], rel=0.02)
    assert half["dev_loss_ce"] != single["dev_loss_ce"]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_overflow_on_one_rank_leaves_the_update_out_on_all(results: Results, run: tuple[str, int]) -> None:
    told = [line for line in results.log(run, "overflow", 0).splitlines() if line.startswith("loss scale")]
    why = ": a gradient is not finite, the update is skipped"
    assert told == [
        f"loss scale 512 from step 4 of the training on{why}",
        "loss scale 1024 from step 12 of the training on",
        f"loss scale 512 from step 13 of the training on{why}",
    ]
    assert results.last(run, "overflow")["loss_scale"] == 512.0
    assert "loss_scale" not in results.last(run, "float32")
    for rank in range(1, run[1]):
        assert told == [line for line in results.log(run, "overflow", rank).splitlines() if line.startswith("loss scale")]
        assert_same(results.weights(run, "overflow"), results.weights(run, "overflow", rank))


@pytest.mark.parametrize("run", [run for run in RUNS if run[1] == 2], ids=str)
def test_ranks_that_update_alone_have_scales_of_their_own(results: Results, run: tuple[str, int]) -> None:
    left_out = [results.log(run, "overflow_apart", rank).count("is skipped") for rank in range(2)]
    assert left_out == [0, 2]
    assert_same(results.weights(run, "overflow_apart"), results.weights(run, "overflow_apart", 1))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_training_that_goes_on_goes_on_with_its_scale(results: Results, run: tuple[str, int]) -> None:
    for whole, stopped in (("whole", "stopped"), ("whole_apart", "rest_apart")):
        for rank in range(run[1]):
            assert_same(results.weights(run, whole, rank), results.weights(run, stopped, rank))
    assert results.last(run, "whole")["loss_scale"] == results.last(run, "stopped")["loss_scale"] > 2048.0
    assert results.last(run, "whole_apart")["loss_scale"] == results.last(run, "apart")["loss_scale"]


def test_returnns_names_are_understood_and_mistakes_are_told_before_training(corpus: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"corpus": corpus, "model": tmp_path / "model", "part": "two.hdf"}
    finished = hvdtrain(TOY, {**keys, "torch_amp": {"dtype": "float16", "grad_scaler": {"init_scale": 2.0}}})
    assert finished.status == 0, finished.err
    assert json.loads((tmp_path / "scores.jsonl").read_text())["loss_scale"] == 2.0
    finished = hvdtrain(TOY, {**keys, "mixed_precision": "float8", "grad_scaler": {"grow": 2}})
    assert finished.status == 2
    assert "mixed_precision: expected 'bfloat16' or 'float16', got 'float8'" in finished.err
    assert "grad_scaler.grow: expected one of init_scale" in finished.err
