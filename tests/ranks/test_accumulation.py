"""Gradients of several batches for one update: the same as one larger batch, sent once, and never needed in a checkpoint."""

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import TOY, hvdtrain, launch
from timeline import rows_of

from hvdtrain.errors import ConfigError
from hvdtrain.learner.accumulation import AccumulationKeys, groups, rounds_per_update

CONFIGS = {"torch": TOY, "tensorflow": TOY.with_name("tensorflow_config.py")}

RUNS = [(framework, size) for framework in CONFIGS for size in (1, 2)]


def jobs(folder: Path, corpus: Path, size: int, framework: str) -> list[dict[str, object]]:
    trainings: dict[str, dict[str, object]] = {}
    # 231 sequences in batches of 5 are 47. An update takes 6 of them, the last one 5: of 2 ranks one lacks its last batch.
    accumulated = {"max_seqs": 5, "accum_grad_multiple_step": 6 // size}
    for losses in ("sum", "mean", "several"):
        trainings[f"{losses}.apart"] = {"losses": losses, **accumulated, "gradient_clip_global_norm": 5.0}
        if size == 1:
            trainings[f"{losses}.whole"] = {"losses": losses, "max_seqs": 30, "gradient_clip_global_norm": 5.0}
    plain = {"part": "even.hdf", "optimizer": {"class": "sgd"}, "max_seqs": 2, "accum_grad_multiple_step": 2}
    trainings["gradients"] = {**plain, "horovod_avg_grad": True}
    trainings["parameters"] = {**plain, "horovod_reduce_type": "param"}
    trainings["two"] = {"part": "two.hdf", "losses": "several", "max_seqs": 1, "accum_grad_multiple_step": 3, "num_epochs": 2}
    if framework == "torch":  # whose statistics are exchanged in every backward pass, of which some batches have several
        synchronized = {"layers": "statistics", "sync_batch_norm": True}
        trainings["batch_norm"] = {**synchronized, "losses": "several", **accumulated}
    else:
        trainings["rows.apart"] = {"layers": "embedding", **accumulated, "gradient_clip_global_norm": 1.0}
        if size == 1:
            trainings["rows.whole"] = {"layers": "embedding", "max_seqs": 30, "gradient_clip_global_norm": 1.0}
    resumed = {"layers": "statistics", "losses": "several", "num_epochs": 2, "accum_grad_multiple_step": 3, "evaluated": True}
    # 20 steps an epoch: updates after steps 3, 6, ..., 18, 20 of each
    param = {"horovod_reduce_type": "param", "horovod_param_sync_step": 2, "optimizer": {"class": "adam"}}
    for name, more in {"resumed": {}, "resumed_param": param, "saved": {"save_interval_steps": 5}}.items():
        trainings[f"{name}.whole"] = {**resumed, **more, "record": folder / f"{name}.whole.ids"}
        stops = {"fault": f"SIGTERM,{size - 1},4,16,25", "record": folder / f"{name}.stopped.ids"}
        trainings[f"{name}.stopped"] = {**resumed, **more, **stops}
    made = []
    for name, overrides in trainings.items():
        keys = {"use_horovod": True, "corpus": corpus, "model": folder / name / "model", "learning_rate": 0.002, **overrides}
        made.append({"name": name, "folder": str(folder), "overrides": {key: str(value) for key, value in keys.items()}})
    return made


class Results(dict[tuple[str, int], Path]):
    """By framework and number of ranks the folder of a launch, which is made when it is first asked for."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        super().__init__()
        self._corpus = corpus
        self._folder = folder

    def __missing__(self, of: tuple[str, int]) -> Path:
        framework, size = of
        folder = self[of] = self._folder / f"{framework}-{size}"
        folder.mkdir()
        (folder / "jobs.json").write_text(json.dumps(jobs(folder, self._corpus, size, framework)))
        command = [str(TOY.parent / "several.py"), str(folder / "jobs.json"), CONFIGS[framework]]
        finished = launch(command, ranks=size, timeout=600)
        assert finished.status == 0, finished.err
        (folder / "out").write_text(finished.out)
        return folder


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(corpus, tmp_path_factory.mktemp("accumulation"))


def weights(folder: Path, name: str, rank: int = 0) -> dict[str, numpy.ndarray]:
    with numpy.load(folder / f"{name}.rank-{rank}.npz") as stored:
        return dict(stored)


def scores(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "scores.jsonl").read_text().splitlines()]


def assert_alike(one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert numpy.abs(array - other[name]).max() <= 1e-5 * numpy.abs(array).max(), name


@pytest.mark.parametrize("of", RUNS, ids=str)
@pytest.mark.parametrize("losses", ["sum", "mean", "several", "rows"])
def test_several_batches_are_one_larger_batch_on_any_number_of_ranks(results: Results, losses: str, of: tuple[str, int]) -> None:
    """Counts of means over all ranks and all batches, and a last update with fewer batches than the others, included."""
    if losses == "rows" and of[0] == "torch":
        pytest.skip("only TensorFlow sends rows")
    alone = results[of[0], 1]
    assert_alike(weights(alone, f"{losses}.whole"), weights(results[of], f"{losses}.apart"))
    told = scores(results[of], f"{losses}.apart")[0]
    assert told["steps"] == 47 if of[1] == 1 else 24  # steps count batches of a rank, as RETURNN's do
    assert told["scores"] == pytest.approx(scores(alone, f"{losses}.apart")[0]["scores"], rel=1e-5)


@pytest.mark.parametrize("of", RUNS, ids=str)
def test_all_ranks_end_with_the_same_model(results: Results, of: tuple[str, int]) -> None:
    names = [path.name.removesuffix(".rank-0.npz") for path in results[of].glob("*.rank-0.npz")]
    assert len(names) >= 12
    for name in names:
        first, last = weights(results[of], name), weights(results[of], name, of[1] - 1)
        assert all(numpy.array_equal(first[key], last[key]) for key in first), name


@pytest.mark.parametrize("of", RUNS, ids=str)
def test_averaging_parameters_after_every_update_is_averaging_gradients(results: Results, of: tuple[str, int]) -> None:
    assert_alike(weights(results[of], "gradients"), weights(results[of], "parameters"))


@pytest.mark.parametrize("of", RUNS, ids=str)
@pytest.mark.parametrize("name", ["resumed", "resumed_param", "saved"])
def test_a_stop_waits_for_an_update_and_training_goes_on_bit_for_bit(results: Results, name: str, of: tuple[str, int]) -> None:
    folder = results[of]
    for rank in range(of[1]):
        whole, stopped = (weights(folder, f"{name}.{how}", rank) for how in ("whole", "stopped"))
        assert all(numpy.array_equal(whole[key], stopped[key]) for key in whole)
        assert (folder / f"{name}.whole.ids.{rank}").read_text() == (folder / f"{name}.stopped.ids.{rank}").read_text()
    assert [line["scores"] for line in scores(folder, f"{name}.whole")] == [
        line["scores"] for line in scores(folder, f"{name}.stopped")
    ]
    told = re.findall(rf"{name}.stopped: stopped by SIGTERM in epoch (\d) after step (\d+);", (folder / "out").read_text())
    assert told == [("1", "9"), ("1", "20"), ("2", "9")]  # two updates after the signal, which came in the midst of a group


def test_ranks_communicate_once_an_update(corpus: Path, tmp_path: Path) -> None:
    """20 steps of 3 batches an update are 7 updates; Horovod's timeline knows what was sent."""
    for framework, config in CONFIGS.items():
        for losses, counts in (("sum", False), ("mean", True), ("several", True)):
            timeline = tmp_path / f"{framework}.{losses}.json"
            keys = {"model": tmp_path / f"{framework}.{losses}" / "model", "losses": losses, "horovod_timeline": timeline}
            finished = hvdtrain(config, {"use_horovod": True, "corpus": corpus, "accum_grad_multiple_step": 3, **keys}, ranks=2)
            assert finished.status == 0, finished.err
            assert sent_in(timeline) == ({"gradients.0": 7, "loss_counts": 7} if counts else {"gradients.0": 7})


def sent_in(timeline: Path) -> dict[str, int]:
    """How often each kind of gradients was sent. The tensors of a bucket have a row each, which agree."""
    times: dict[str, set[int]] = {}
    for row, done in rows_of(timeline).items():
        if (found := re.search(r"gradients\.\d+|loss_counts", row)) is not None:
            times.setdefault(found.group(), set()).add(done.count("MPI_ALLREDUCE"))
    return {name: number for name, numbers in times.items() for number in numbers}


def test_groups_follow_a_function_and_what_is_left_is_a_group() -> None:
    sizes = iter([1, 2, 4])
    assert list(groups(6, lambda: next(sizes))) == [range(1), range(1, 3), range(3, 6)]
    asked: list[dict[str, Any]] = []

    def rule(**given: Any) -> int:
        asked.append(given)
        return 3

    assert rounds_per_update(AccumulationKeys(accum_grad_multiple_step=rule))(2, 1.5, 30) == 3
    assert asked == [{"epoch": 2, "epoch_continuous": 1.5, "global_train_step": 30}]
    assert rounds_per_update(AccumulationKeys(accum_grad_multiple_step=None))(1, 0.0, 0) == 1
    with pytest.raises(ConfigError, match="expected a function that returns a positive integer, got 0"):
        rounds_per_update(AccumulationKeys(accum_grad_multiple_step=lambda **_: 0))(1, 0.0, 0)


def test_a_number_that_is_none_is_told(corpus: Path, tmp_path: Path) -> None:
    finished = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "model", "accum_grad_multiple_step": 0})
    assert finished.status == 2
    assert "accum_grad_multiple_step: expected a positive number, got 0" in finished.err
