"""What holds whatever the framework and the transport: N ranks learn what one rank learns, number by number.

A new transport is a line in TRANSPORTS of tests/trainings.py and its runs in SEVERAL; a new framework is a config like
tests/toy/config.py in CONFIGS. SEVERAL covers every framework, transport and number of ranks; `make test-soak` has the rest.
`make test` has PyTorch on two ranks, and of TensorFlow what a graph computes otherwise.
"""

import math
import re
import time
from collections.abc import Iterable
from pathlib import Path

import numpy
import pytest
from launching import TOY, hvdtrain
from trainings import TRANSPORTS, Results, Run, Trained, Trainings, assert_alike, assert_same, trains

PAIRS = [("torch", "horovod"), ("torch", "torch.distributed"), ("tensorflow", "horovod")]
"""Which transports serve which framework, in addition to single, which serves all."""

PATIENCE = 10.0
"""Seconds within which the whole job has to end after a rank failed."""

SEVERAL = [Run("torch", "horovod", 2), Run("torch", "torch.distributed", 3), Run("tensorflow", "horovod", 2)]
AGAIN = [run for pair in PAIRS for size in (2, 3) if (run := Run(*pair, size)) not in SEVERAL]
"""The other numbers of ranks: with --soak."""

TORCH, DISTRIBUTED, TENSORFLOW = SEVERAL

# One launch does all of a run's trainings; the overrides of each by name. A global batch is 12 sequences for every
# number of ranks, so 231 sequences are 20 steps, in the last of which only one rank has a batch.
IN_PARTS = {"layers": "statistics", "optimizer": {"class": "adam"}}
TRAININGS: dict[str, dict[str, object]] = {
    "sum": {"losses": "sum", "gradient_clip_global_norm": 50.0},
    "mean": {
        "losses": "mean",
        "gradient_clip_global_norm": 1.0,
        "optimizer": {"class": "adam"},
        "learning_rate_schedule": "cosine",  # ends with the epoch, in the last step of which only one rank has a batch
    },
    "several": {"losses": "several"},
    "mean_average": {"losses": "mean", "horovod_avg_grad": True},
    "grad_average": {"part": "even.hdf", "horovod_avg_grad": True, "optimizer": {"class": "sgd"}},
    "param_every_step": {"part": "even.hdf", "horovod_reduce_type": "param", "optimizer": {"class": "sgd"}},
    "param_every_7": {"horovod_reduce_type": "param", "horovod_param_sync_step": 7, "layers": "statistics", "num_epochs": 2},
    "param_by_time": {"horovod_reduce_type": "param", "horovod_param_sync_time_diff": 0.05, "layers": "statistics"},
    "evaluated": {"learning_rate": 0.0, "evaluated": True, "losses": "several", "max_seqs": 7},
    "by_frames": {"max_seqs": None, "batch_size": 30, "record": True},
    "balanced": {"max_seqs": 4, "balance_ranks": 6, "num_epochs": 2, "record": True},
    # Ranks have different numbers of batches, rank 0 fewer than another.
    "ordered_alike": {"horovod_dataset_distribution": "random_seed_offset", "max_seqs": None, "batch_size": 30, "record": True},
    "fewer_than_ranks": {
        "part": "two.hdf",
        "max_seqs": 1,
        "losses": "several",
        "num_epochs": 3,
        "horovod_scale_lr": "divide",
    },
    "whole": {**IN_PARTS, "num_epochs": 2},
    "first_part": {**IN_PARTS, "num_epochs": 1, "saved_as": "parts"},
    "second_part": {**IN_PARTS, "num_epochs": 2, "saved_as": "parts"},
}

ROWS: dict[str, dict[str, object]] = {
    "rows": {"layers": "embedding", "gradient_clip_global_norm": 1.0},
    "rows_averaged": {"layers": "embedding", "horovod_avg_grad": True, "losses": "mean", "optimizer": {"class": "adam"}},
    "rows_fewer_than_ranks": {"layers": "embedding", "part": "two.hdf", "max_seqs": 1, "num_epochs": 3},
}
"""Embeddings whose gradients travel as rows: with TensorFlow."""
TRAININGS |= ROWS

COMPARED = ("sum", "mean", "several", "mean_average", "rows", "rows_averaged")
"""What ends with the same weights on one rank."""

ALONE = (*COMPARED, "param_every_7", "evaluated")
"""What is trained on one rank, too."""

OF_TENSORFLOW = ("mean", "several", "fewer_than_ranks", "rows")
MORE_OF_TENSORFLOW = ("sum", "grad_average", "param_every_step", "evaluated", "rows_averaged", "rows_fewer_than_ranks")
"""The others are averages, times and orders, of which graphs know nothing; and test_exact_resume.py stops TensorFlow."""

OF_TORCH_DISTRIBUTED = (
    "mean",
    "several",
    "param_every_7",
    "evaluated",
    "by_frames",
    "balanced",
    "ordered_alike",
    "fewer_than_ranks",
)
"""What depends on the number of ranks, or on the transport; test_torch_dist.py compares the rest with Horovod."""

NAMES = {
    "torch": {"first": "first.weight", "frozen": "frozen", "unused": "unused", "mean": "norm.running_mean"},
    "tensorflow": {"first": "first.kernel", "frozen": "frozen.kernel", "unused": "unused", "mean": "norm.moving_mean"},
}
"""What each framework's toy model calls the same parameters."""


@trains(TORCH.alone, TORCH, TENSORFLOW.alone, TENSORFLOW, slow=[DISTRIBUTED], again=AGAIN)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    if run.framework == "tensorflow":
        return named(run, OF_TENSORFLOW)
    return named(run, OF_TORCH_DISTRIBUTED if run.transport == "torch.distributed" else TRAININGS.keys() - ROWS.keys())


@trains(slow=[TENSORFLOW.alone, TENSORFLOW], again=[run for run in AGAIN if run.framework == "tensorflow"])
def more_of_tensorflow(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return named(run, {*MORE_OF_TENSORFLOW})


def named(run: Run, names: Iterable[str]) -> dict[str, dict[str, object]]:
    return {
        name: {"watchdog_timeout": 150, **TRAININGS[name]}
        for name in TRAININGS
        if name in names and (run.size > 1 or name in ALONE)
    }


Case = tuple[Trainings, Run]
FAST: list[Case] = [(trainings, TORCH), (trainings, TENSORFLOW)]
SLOW: list[Case] = [(trainings, DISTRIBUTED), (more_of_tensorflow, TENSORFLOW)]
OF_SOAK: list[Case] = [(trainings, run) for run in AGAIN]
OF_SOAK += [(more_of_tensorflow, run) for run in AGAIN if run.framework == "tensorflow"]


def cases_with(*names: str) -> pytest.MarkDecorator:
    """The cases that have trainings of these names, each with its mark."""
    found = []
    for cases, marks in ((FAST, ()), (SLOW, pytest.mark.slow), (OF_SOAK, pytest.mark.again)):
        for case in cases:
            function, run = case
            if set(names) <= function(run, Path()).keys():
                found.append(pytest.param(case, marks=marks, id=f"{function.__name__}-{run}"))
    return pytest.mark.parametrize("case", found)


@pytest.fixture
def several(trained: Trained, case: Case) -> Results:
    return trained(*case)


@pytest.fixture
def one(trained: Trained, case: Case) -> Results:
    """The same on one rank."""
    return trained(case[0], case[1].alone)


@cases_with()
def test_weights_after_20_steps_do_not_depend_on_the_number_of_ranks(one: Results, several: Results) -> None:
    names = [name for name in COMPARED if name in several.names]
    assert len(names) >= 2
    for name in names:
        assert_alike(one.weights(name), several.weights(name), 1e-5)
        assert several.scores(name)[-1] == pytest.approx(one.scores(name)[-1], rel=1e-5)
        assert several.reports(name)[0]["steps"] == 20


@cases_with("mean")
def test_the_rates_of_a_schedule_in_epochs_do_not_depend_on_the_number_of_ranks(one: Results, several: Results) -> None:
    """To the last bit: 228 of 231 sequences precede the last update."""
    [alone], [together] = one.reports("mean"), several.reports("mean")
    assert alone["learning_rate"] == 0.01 * 0.5 * (1 + math.cos(math.pi * 228 / 231))
    assert together["learning_rates"] == alone["learning_rates"]


@cases_with()
def test_all_ranks_end_with_the_same_model_and_only_rank_0_prints(several: Results) -> None:
    """Parameters and all buffers, bit for bit; also where an epoch's steps are no multiple of the sync interval."""
    for name in several.names:
        first = several.weights(name)
        for rank in range(1, several.run.size):
            assert_same(first, several.weights(name, rank))
            assert several.out(name, rank) == ""
        assert several.out(name).count("Finished training in epoch") == 1


@cases_with("fewer_than_ranks")
def test_the_scaled_learning_rate_is_logged(several: Results) -> None:
    rate = f"{0.01 / several.run.size:.6g}"
    assert f"start epoch 1 global train step 0 with effective learning rate {rate} ..." in several.out("fewer_than_ranks")


@cases_with("sum", "evaluated")
def test_training_changes_the_model_and_leaves_frozen_and_unused_parameters_alone(one: Results) -> None:
    names = NAMES[one.run.framework]
    still, trained = one.weights("evaluated"), one.weights("sum")
    assert not numpy.allclose(still[names["first"]], trained[names["first"]], rtol=1e-3)
    assert numpy.array_equal(still[names["frozen"]], trained[names["frozen"]])
    assert numpy.array_equal(still[names["unused"]], trained[names["unused"]])


@cases_with("grad_average", "param_every_step")
def test_averaging_parameters_after_every_sgd_step_is_averaging_gradients(several: Results) -> None:
    assert_alike(several.weights("grad_average"), several.weights("param_every_step"), 1e-5)


@cases_with("param_every_7")
def test_averaging_parameters_is_not_the_same_as_training_alone(one: Results, several: Results) -> None:
    names = NAMES[several.run.framework]
    alone, together = one.weights("param_every_7"), several.weights("param_every_7")
    assert not numpy.allclose(alone[names["first"]], together[names["first"]], rtol=1e-3)
    assert numpy.abs(together[names["mean"]]).max() > 0


@cases_with("sum")
def test_syncs_and_bytes_are_counted(one: Results, several: Results) -> None:
    """20 updates an epoch: a sync after 7, after 14 and at the end, or after each, or gradients 20 times. In graphs, too."""
    size = sum(array.nbytes for name, array in several.weights("sum").items() if not name.startswith("frozen"))
    for name, syncs in (("param_every_7", 3), ("param_every_step", 20)):
        for report in several.reports(name) if name in several.names else ():
            assert report["syncs"] == syncs
            assert report["sent"] >= syncs * size
            assert report["sent"] % syncs == 0
            assert f"train epoch 1, exchange: {syncs} syncs of parameters, " in several.out(name)
    [report] = several.reports("sum")
    size += 4 * 5 if several.run.framework == "torch" else 0  # which rank has a gradient of which parameter
    assert (report["syncs"], report["sent"]) == (0, 20 * size)
    assert f"train epoch 1, exchange: {20 * size / 1024:.1f} KB sent by each rank" in several.out("sum")
    assert one.reports("sum")[0]["sent"] == 0


@cases_with("evaluated")
def test_evaluation_gives_the_same_numbers_on_any_number_of_ranks(one: Results, several: Results) -> None:
    """To the last bit: with a learning rate of zero the models are the same."""
    alone, together = one.scores("evaluated")[-1], several.scores("evaluated")[-1]
    dev = {name: value for name, value in alone.items() if name.startswith("dev_")}
    assert set(dev) == {"dev_loss_ce", "dev_loss_energy", "dev_loss_first", "dev_loss_fer", "dev_loss_total"}
    assert dev == {name: together[name] for name in dev}


@cases_with("by_frames", "balanced", "ordered_alike")
def test_every_sequence_is_trained_on_once_an_epoch_or_by_every_rank_in_its_own_order(several: Results) -> None:
    assert several.trained_on("by_frames") == {(1, number): 1 for number in range(231)}
    assert several.trained_on("balanced") == {(epoch, number): 1 for epoch in (1, 2) for number in range(231)}
    size = several.run.size
    assert several.trained_on("ordered_alike") == {(1, number): size for number in range(231)}
    assert len({several.needed(f"ordered_alike.ids.{rank}").read_text() for rank in range(size)}) == size


@cases_with("whole")
def test_two_epochs_in_one_go_or_in_two(several: Results) -> None:
    """Bit for bit, dropout and BatchNorm included."""
    assert_same(several.weights("whole"), several.weights("second_part"))
    first = NAMES[several.run.framework]["first"]
    assert not numpy.array_equal(several.weights("whole")[first], several.weights("first_part")[first])
    assert "training continues after epoch 1, step 20." in several.out("second_part")


@cases_with()
def test_a_job_in_one_framework_never_imports_the_other(one: Results, several: Results) -> None:
    for results in (one, several):
        imported = (results.folder / "frameworks").read_text()
        assert imported == {"torch": "torch", "tensorflow": "keras tensorflow"}[results.run.framework]


@pytest.mark.parametrize("transport", ["horovod", pytest.param("torch.distributed", marks=pytest.mark.slow)])
def test_a_rank_that_raises_ends_the_job_and_its_traceback_is_shown(corpus: Path, tmp_path: Path, transport: str) -> None:
    overrides = {"corpus": corpus, "model": tmp_path / "model", "record": tmp_path / "record", "fault": "raise,1,5"}
    finished = hvdtrain(TOY, {**overrides, **TRANSPORTS[transport]}, ranks=2)
    assert time.time() - float((tmp_path / "record.fault").read_text()) < PATIENCE
    assert finished.status != 0
    assert "RuntimeError: planted by the test" in finished.err
    told = re.findall(r"rank \d of \d: RuntimeError: planted", finished.err)
    assert told == ["rank 1 of 2: RuntimeError: planted"]  # the others have nothing to tell
