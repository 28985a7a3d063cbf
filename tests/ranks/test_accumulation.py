"""Gradients of several batches for one update: the same as one larger batch, sent once, and never needed in a checkpoint."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from launching import TOY, hvdtrain
from timeline import rows_of
from trainings import ResultsOf, Run, Trained, assert_alike, assert_same, trains

from hvdtrain.errors import ConfigError
from hvdtrain.learner.steps import AccumulationKeys, groups, rounds_per_update

RUNS = [Run(framework, "horovod", size) for framework in ("torch", "tensorflow") for size in (1, 2)]

STOPPED = [(name, run) for run in RUNS[:2] for name in ("resumed", "resumed_param", "saved")]
"""What is stopped. TensorFlow traces its graphs anew every time: test_update_together.py stops it."""


@trains(*RUNS)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    size = run.size
    made: dict[str, dict[str, object]] = {}
    # 231 sequences in batches of 5 are 47. An update takes 6 of them, the last one 5: one of 2 ranks has no last batch.
    accumulated = {"max_seqs": 5, "accum_grad_multiple_step": 6 // size}
    for losses in ("sum", "mean", "several"):
        same = {"losses": losses, "gradient_clip_global_norm": 5.0}
        same |= {"learning_rate_schedule": "one_cycle"} if losses == "mean" else {}
        made[f"{losses}.apart"] = {**same, **accumulated}
        if size == 1:
            made[f"{losses}.whole"] = {**same, "max_seqs": 30}
        else:
            made[f"{losses}.apart"]["timeline"] = folder / f"{losses}.timeline.json"
    plain = {"part": "even.hdf", "optimizer": {"class": "sgd"}, "max_seqs": 2, "accum_grad_multiple_step": 2}
    made["gradients"] = {**plain, "horovod_avg_grad": True}
    made["parameters"] = {**plain, "horovod_reduce_type": "param"}
    made["two"] = {"part": "two.hdf", "losses": "several", "max_seqs": 1, "accum_grad_multiple_step": 3, "num_epochs": 2}
    if run.framework == "torch":  # whose statistics are exchanged in every backward pass, of which some batches have several
        synchronized = {"layers": "statistics", "sync_batch_norm": True}
        made["batch_norm"] = {**synchronized, "losses": "several", **accumulated}
    else:
        made["rows.apart"] = {"layers": "embedding", **accumulated, "gradient_clip_global_norm": 1.0}
        if size == 1:
            made["rows.whole"] = {"layers": "embedding", "max_seqs": 30, "gradient_clip_global_norm": 1.0}
    resumed = {"layers": "statistics", "losses": "several", "num_epochs": 2, "accum_grad_multiple_step": 3, "evaluated": True}
    # 20 steps an epoch: updates after steps 3, 6, ..., 18, 20 of each
    param = {"horovod_reduce_type": "param", "horovod_param_sync_step": 2, "optimizer": {"class": "adam"}}
    for name, more in {"resumed": {}, "resumed_param": param, "saved": {"save_interval_steps": 5}}.items():
        if (name, run) not in STOPPED:
            continue
        made[f"{name}.whole"] = {**resumed, **more, "record": True}
        made[f"{name}.stopped"] = {**resumed, **more, "record": True, "fault": f"SIGTERM,{size - 1},4,16,25"}
    return {name: {"learning_rate": 0.002, **given} for name, given in made.items()}


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


@pytest.mark.parametrize("of", RUNS, ids=str)
@pytest.mark.parametrize("losses", ["sum", "mean", "several", "rows"])
def test_several_batches_are_one_larger_batch_on_any_number_of_ranks(results: ResultsOf, losses: str, of: Run) -> None:
    """Counts of means over all ranks and all batches, and a last update with fewer batches than the others, included."""
    if losses == "rows" and of.framework == "torch":
        pytest.skip("only TensorFlow sends rows")
    alone, several = results(Run(of.framework, "horovod", 1)), results(of)
    assert_alike(alone.weights(f"{losses}.whole"), several.weights(f"{losses}.apart"))
    assert several.reports(f"{losses}.apart")[0]["steps"] == (47 if of.size == 1 else 24)  # a rank's batches, as in RETURNN
    assert several.scores(f"{losses}.apart")[0] == pytest.approx(alone.scores(f"{losses}.apart")[0], rel=1e-5)
    rates = [made.reports(f"{losses}.{name}")[0].get("learning_rates") for made, name in ((alone, "whole"), (several, "apart"))]
    assert rates[0] == rates[1], "an update's place in the epoch is that of its first sequence"


@pytest.mark.parametrize("of", RUNS, ids=str)
def test_all_ranks_end_with_the_same_model(results: ResultsOf, of: Run) -> None:
    assert len(results(of).names) >= (12 if of.framework == "torch" else 7)
    for name in results(of).names:
        assert_same(results(of).weights(name), results(of).weights(name, of.size - 1))


@pytest.mark.parametrize("of", RUNS, ids=str)
def test_averaging_parameters_after_every_update_is_averaging_gradients(results: ResultsOf, of: Run) -> None:
    assert_alike(results(of).weights("gradients"), results(of).weights("parameters"))


@pytest.mark.parametrize(("name", "of"), STOPPED, ids=str)
def test_a_stop_waits_for_an_update_and_training_goes_on_bit_for_bit(results: ResultsOf, name: str, of: Run) -> None:
    made = results(of)
    for rank in range(of.size):
        assert_same(made.weights(f"{name}.whole", rank), made.weights(f"{name}.stopped", rank))
        assert made.needed(f"{name}.whole.ids.{rank}").read_text() == made.needed(f"{name}.stopped.ids.{rank}").read_text()
    assert made.scores(f"{name}.whole") == made.scores(f"{name}.stopped")
    told = re.findall(r"stopped by SIGTERM in epoch (\d) after step (\d+);", made.out(f"{name}.stopped"))
    assert told == [("1", "9"), ("1", "20"), ("2", "9")]  # two updates after the signal, which came in the midst of a group


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_ranks_communicate_once_an_update(results: ResultsOf, framework: str) -> None:
    """24 steps of 3 batches an update are 8 updates; Horovod's timeline knows what was sent.

    With PyTorch, the number of elements of the only loss travels with the gradients.
    """
    for losses, counts in (("sum", False), ("mean", framework == "tensorflow"), ("several", True)):
        sent = sent_in(results(Run(framework, "horovod", 2)).needed(f"{losses}.timeline.json"))
        assert sent == ({"gradients.0": 8, "loss_counts": 8} if counts else {"gradients.0": 8})


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


def test_a_wrong_number_is_reported(corpus: Path, tmp_path: Path) -> None:
    finished = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "model", "accum_grad_multiple_step": -1})
    assert finished.status == 2
    assert "accum_grad_multiple_step: expected a positive number, got -1" in finished.err
