"""Gradients of several batches for one update: the same as one larger batch, sent once, and never needed in a checkpoint."""

import re
from pathlib import Path
from typing import Any

import pytest
from launching import TOY, hvdtrain
from timeline import rows_of
from trainings import ResultsOf, Run, assert_alike, assert_same, marked, trains

from hvdtrain.errors import ConfigError
from hvdtrain.learner.steps import AccumulationKeys, groups, steps_per_update

TWO, TENSORFLOW = Run("torch", "horovod", 2), Run("tensorflow", "horovod", 2)
CASES = [TWO, *marked([TENSORFLOW], pytest.mark.slow)]

COMPARED = {"torch": ("sum", "mean", "several"), "tensorflow": ("several", "rows")}
"""What is compared with one rank and larger batches. Only TensorFlow sends rows."""


@trains(TWO.alone, TWO, slow=[TENSORFLOW.alone, TENSORFLOW])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made: dict[str, dict[str, object]] = {}
    # 231 sequences in batches of 5 are 47. An update takes 6 of them, the last one 5: one of 2 ranks has no last batch.
    accumulated = {"max_seqs": 5, "accum_grad_multiple_step": 6 // run.size}
    for losses in COMPARED[run.framework]:
        same: dict[str, object] = {"losses": losses, "gradient_clip_global_norm": 5.0}
        if losses == "mean":
            same["learning_rate_schedule"] = "one_cycle"
        if losses == "rows":
            same = {"layers": "embedding", "gradient_clip_global_norm": 1.0}
        made[losses] = {**same, "max_seqs": 30} if run.size == 1 else {**same, **accumulated}
        if run.size > 1:
            made[losses]["timeline"] = folder / f"{losses}.timeline.json"
    if run == TWO.alone:
        made["apart"] = {"losses": "several", "gradient_clip_global_norm": 5.0, **accumulated}
    if run == TWO:
        made |= of_no_framework(accumulated)
    return {name: {"learning_rate": 0.002, **given} for name, given in made.items()}


def of_no_framework(accumulated: dict[str, object]) -> dict[str, dict[str, object]]:
    """Gradients are accumulated, and trainings are stopped, in test_update_together.py."""
    plain = {"part": "even.hdf", "optimizer": {"class": "sgd"}, "max_seqs": 2, "accum_grad_multiple_step": 2}
    made: dict[str, dict[str, object]] = {
        "gradients": {**plain, "horovod_avg_grad": True},
        "parameters": {**plain, "horovod_reduce_type": "param"},
        "two": {"part": "two.hdf", "losses": "several", "max_seqs": 1, "accum_grad_multiple_step": 3, "num_epochs": 2},
        # whose statistics are exchanged in every backward pass, of which some batches have several
        "batch_norm": {"layers": "statistics", "sync_batch_norm": True, "losses": "several", **accumulated},
    }
    return made


@pytest.mark.parametrize("of", CASES, ids=str)
def test_several_batches_are_one_larger_batch_on_any_number_of_ranks(results: ResultsOf, of: Run) -> None:
    """Counts of means over all ranks and all batches, and a last update with fewer batches than the others, included."""
    alone, together = results(of.alone), results(of)
    pairs = [(name, together, name) for name in COMPARED[of.framework]]
    for whole, several, apart in pairs if of.framework != "torch" else [*pairs, ("several", alone, "apart")]:
        assert_alike(alone.weights(whole), several.weights(apart))
        # a rank's batches, as in RETURNN
        assert several.reports(apart)[0]["steps"] == (47 if several is alone else 24)
        assert several.scores(apart)[0] == pytest.approx(alone.scores(whole)[0], rel=1e-5)
        rates = [made.reports(name)[0].get("learning_rates") for made, name in ((alone, whole), (several, apart))]
        assert rates[0] == rates[1], "an update's place in the epoch is that of its first sequence"


@pytest.mark.parametrize("of", CASES, ids=str)
def test_all_ranks_end_with_the_same_model(results: ResultsOf, of: Run) -> None:
    assert len(results(of).names) == (7 if of.framework == "torch" else 2)
    for name in results(of).names:
        assert_same(results(of).weights(name), results(of).weights(name, 1))


def test_averaging_parameters_after_every_update_is_averaging_gradients(results: ResultsOf) -> None:
    assert_alike(results(TWO).weights("gradients"), results(TWO).weights("parameters"))


@pytest.mark.parametrize("of", CASES, ids=str)
def test_ranks_communicate_once_an_update(results: ResultsOf, of: Run) -> None:
    """24 steps of 3 batches an update are 8 updates; Horovod's timeline knows what was sent.

    With PyTorch, the number of elements of the only loss travels with the gradients.
    """
    for losses, counts in (("sum", False), ("mean", False), ("several", True)):
        if losses in COMPARED[of.framework]:
            sent = sent_in(results(of).needed(f"{losses}.timeline.json"))
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

    assert steps_per_update(AccumulationKeys(accum_grad_multiple_step=rule))(2, 1.5, 30) == 3
    assert asked == [{"epoch": 2, "epoch_continuous": 1.5, "global_train_step": 30}]
    assert steps_per_update(AccumulationKeys(accum_grad_multiple_step=None))(1, 0.0, 0) == 1
    with pytest.raises(ConfigError, match="expected a function that returns a positive integer, got 0"):
        steps_per_update(AccumulationKeys(accum_grad_multiple_step=lambda **_: 0))(1, 0.0, 0)


def test_a_wrong_number_is_reported(corpus: Path, tmp_path: Path) -> None:
    finished = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "model", "accum_grad_multiple_step": -1})
    assert finished.status == 2
    assert "accum_grad_multiple_step: expected a positive number, got -1" in finished.err
