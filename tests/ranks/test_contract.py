"""What holds whatever the framework and the transport: N ranks learn what one rank learns, number by number.

A new transport is a line in TRANSPORTS of tests/trainings.py and its runs in SEVERAL; a new framework is a config like
tests/toy/config.py in CONFIGS. SEVERAL covers every framework, transport and number of ranks; `make test-soak` has the rest.
"""

import math
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import hvdtrain
from trainings import CONFIGS, TRANSPORTS, ResultsOf, Run, Trained, assert_alike, assert_same, marked, trains

PAIRS = [("torch", "horovod"), ("torch", "torch.distributed"), ("tensorflow", "horovod")]
"""Which transports serve which framework, in addition to single, which serves all."""

PATIENCE = 10.0
"""Seconds within which the whole job has to end after a rank failed."""


OF_ONE_FRAMEWORK: dict[str, dict[str, dict[str, object]]] = {
    "torch": {},
    "tensorflow": {
        "rows": {"layers": "embedding", "gradient_clip_global_norm": 1.0},
        "rows_averaged": {"layers": "embedding", "horovod_avg_grad": True, "losses": "mean", "optimizer": {"class": "adam"}},
        "rows_fewer_than_ranks": {"layers": "embedding", "part": "two.hdf", "max_seqs": 1, "num_epochs": 3},
    },
}
"""Embeddings whose gradients travel as rows: with TensorFlow."""

ALONE = [Run(framework, "single", 1) for framework in OF_ONE_FRAMEWORK]
SEVERAL = [Run("torch", "horovod", 2), Run("torch", "torch.distributed", 3), Run("tensorflow", "horovod", 2)]
AGAIN = [run for pair in PAIRS for size in (2, 3) if (run := Run(*pair, size)) not in SEVERAL]
"""The other numbers of ranks: with --soak."""

ALL = [*SEVERAL, *marked(AGAIN)]

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
    "grad_statistics": {"layers": "statistics", "num_epochs": 2},
    "evaluated": {"learning_rate": 0.0, "evaluated": True, "losses": "several", "max_seqs": 7},
    "by_frames": {"max_seqs": None, "batch_size": 30, "num_epochs": 2, "record": True},
    "balanced": {"max_seqs": 4, "balance_ranks": 6, "num_epochs": 2, "record": True},
    "ordered_alike": {"horovod_dataset_distribution": "random_seed_offset", "num_epochs": 2, "record": True},
    "fewer_than_ranks": {"part": "two.hdf", "max_seqs": 1, "losses": "several", "num_epochs": 3},
    "divided": {"horovod_scale_lr": "divide"},
    "whole": {**IN_PARTS, "num_epochs": 3},
    "first_part": {**IN_PARTS, "num_epochs": 1, "saved_as": "parts"},
    "second_part": {**IN_PARTS, "num_epochs": 3, "saved_as": "parts"},
}

OF_NO_FRAMEWORK = ("by_frames", "balanced", "ordered_alike")
"""Who trains on what: with PyTorch."""

COMPARED = ("sum", "mean", "several", "mean_average", "rows", "rows_averaged", "param_every_7", "evaluated", "divided")
"""What TensorFlow trains alone: what is compared with several ranks."""

NAMES = {
    "torch": {"first": "first.weight", "frozen": "frozen", "unused": "unused", "mean": "norm.running_mean"},
    "tensorflow": {"first": "first.kernel", "frozen": "frozen.kernel", "unused": "unused", "mean": "norm.moving_mean"},
}
"""What each framework's toy model calls the same parameters."""


@trains(*ALONE, *SEVERAL, again=AGAIN)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    made = TRAININGS | OF_ONE_FRAMEWORK[run.framework]
    if run.framework != "torch":
        made = {name: given for name, given in made.items() if name not in OF_NO_FRAMEWORK and (run.size > 1 or name in COMPARED)}
    return {name: {"watchdog_timeout": 150, **given} for name, given in made.items()}


def of_torch(runs: list[Any]) -> list[Any]:
    return [run for run in runs if (run if isinstance(run, Run) else run.values[0]).framework == "torch"]


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


@pytest.mark.parametrize("run", ALL, ids=str)
def test_weights_after_20_steps_do_not_depend_on_the_number_of_ranks(results: ResultsOf, run: Run) -> None:
    for name in ("sum", "mean", "several", "mean_average"):
        assert_alike(results(run.alone).weights(name), results(run).weights(name), 1e-5)
        assert results(run).scores(name)[-1] == pytest.approx(results(run.alone).scores(name)[-1], rel=1e-5)
        assert results(run).reports(name)[0]["steps"] == 20


@pytest.mark.parametrize("run", ALL, ids=str)
def test_the_rates_of_a_schedule_in_epochs_do_not_depend_on_the_number_of_ranks(results: ResultsOf, run: Run) -> None:
    """To the last bit: 228 of 231 sequences precede the last update."""
    one, several = (results(each).reports("mean")[0] for each in (run.alone, run))
    assert one["learning_rate"] == 0.01 * 0.5 * (1 + math.cos(math.pi * 228 / 231))
    assert several["learning_rates"] == one["learning_rates"]


@pytest.mark.parametrize("run", [run for run in ALL if run not in of_torch(ALL)], ids=str)
def test_sparse_gradients_do_not_depend_on_the_number_of_ranks(results: ResultsOf, run: Run) -> None:
    for name in ("rows", "rows_averaged"):
        assert_alike(results(run.alone).weights(name), results(run).weights(name), 1e-5)
    assert not numpy.array_equal(results(run).weights("rows")["table"], results(run).weights("rows_averaged")["table"])


@pytest.mark.parametrize("run", ALL, ids=str)
def test_all_ranks_end_with_the_same_model(results: ResultsOf, run: Run) -> None:
    """Parameters and all buffers, bit for bit; also where an epoch's steps are no multiple of the sync interval."""
    for name in results(run).names:
        first = results(run).weights(name)
        for rank in range(1, run.size):
            assert_same(first, results(run).weights(name, rank))


@pytest.mark.parametrize("run", ALONE, ids=str)
def test_training_changes_the_model_and_leaves_frozen_and_unused_parameters_alone(results: ResultsOf, run: Run) -> None:
    names = NAMES[run.framework]
    still, trained = results(run).weights("evaluated"), results(run).weights("sum")
    assert not numpy.allclose(still[names["first"]], trained[names["first"]], rtol=1e-3)
    assert numpy.array_equal(still[names["frozen"]], trained[names["frozen"]])
    assert numpy.array_equal(still[names["unused"]], trained[names["unused"]])


@pytest.mark.parametrize("run", ALL, ids=str)
def test_averaging_parameters_after_every_sgd_step_is_averaging_gradients(results: ResultsOf, run: Run) -> None:
    assert_alike(results(run).weights("grad_average"), results(run).weights("param_every_step"), 1e-5)


@pytest.mark.parametrize("run", ALL, ids=str)
def test_averaging_parameters_is_not_the_same_as_training_alone(results: ResultsOf, run: Run) -> None:
    names = NAMES[run.framework]
    alone, together = results(run.alone).weights("param_every_7"), results(run).weights("param_every_7")
    assert not numpy.allclose(alone[names["first"]], together[names["first"]], rtol=1e-3)
    assert numpy.abs(together[names["mean"]]).max() > 0


@pytest.mark.parametrize("run", ALL, ids=str)
def test_syncs_and_bytes_are_counted(results: ResultsOf, run: Run) -> None:
    """20 updates an epoch: a sync after 7, after 14 and at the end, or gradients 20 times. In TensorFlow's graphs, too."""
    weights = results(run).weights("sum")
    size = sum(array.nbytes for name, array in weights.items() if not name.startswith("frozen"))
    for report in results(run).reports("param_every_7"):
        assert report["syncs"] == 3
        assert report["sent"] >= 3 * size
        assert report["sent"] % 3 == 0
    [report] = results(run).reports("sum")
    size += 4 * 5 if run.framework == "torch" else 0  # which rank has a gradient of which parameter
    assert (report["syncs"], report["sent"]) == (0, 20 * size)
    assert f"train epoch 1, exchange: {20 * size / 1024:.1f} KB sent by each rank" in results(run).out("sum")
    assert "train epoch 1, exchange: 3 syncs of parameters, " in results(run).out("param_every_7")
    assert results(run.alone).reports("sum")[0]["sent"] == 0


@pytest.mark.parametrize("run", ALL, ids=str)
def test_evaluation_gives_the_same_numbers_on_any_number_of_ranks(results: ResultsOf, run: Run) -> None:
    """To the last bit: with a learning rate of zero the models are the same."""
    one, several = results(run.alone).scores("evaluated")[-1], results(run).scores("evaluated")[-1]
    dev = {name: value for name, value in one.items() if name.startswith("dev_")}
    assert set(dev) == {"dev_loss_ce", "dev_loss_energy", "dev_loss_first", "dev_loss_fer", "dev_loss_total"}
    assert dev == {name: several[name] for name in dev}


@pytest.mark.parametrize("run", of_torch([*ALONE, *ALL]), ids=str)
def test_every_sequence_is_trained_on_once_an_epoch(results: ResultsOf, run: Run) -> None:
    for name in ("by_frames", "balanced"):
        assert results(run).trained_on(name) == {(epoch, number): 1 for epoch in (1, 2) for number in range(231)}, name


@pytest.mark.parametrize("run", of_torch([*ALONE, *ALL]), ids=str)
def test_with_random_seed_offset_every_rank_sees_everything_in_its_own_order(results: ResultsOf, run: Run) -> None:
    everything = {(epoch, number): run.size for epoch in (1, 2) for number in range(231)}
    assert results(run).trained_on("ordered_alike") == everything
    orders = {(results(run).folder / f"ordered_alike.ids.{rank}").read_text() for rank in range(run.size)}
    assert len(orders) == run.size


@pytest.mark.parametrize("run", [*of_torch(ALONE), *ALL], ids=str)
def test_three_epochs_in_one_go_or_in_two(results: ResultsOf, run: Run) -> None:
    """Bit for bit, dropout and BatchNorm included; on 3 ranks a sum may be added up in another order the next time."""
    compare = assert_same if run.size < 3 else lambda one, other: assert_alike(one, other, 1e-5)
    compare(results(run).weights("whole"), results(run).weights("second_part"))
    assert not numpy.array_equal(*(results(run).weights(name)[NAMES[run.framework]["first"]] for name in ("whole", "first_part")))
    assert "training continues after epoch 1, step 20." in results(run).out("second_part")


@pytest.mark.parametrize("run", [*ALONE, *ALL], ids=str)
def test_only_rank_0_prints_and_the_scaled_learning_rate_is_logged(results: ResultsOf, run: Run) -> None:
    for name in results(run).names:
        assert results(run).out(name).count("Finished training in epoch") == 1
        assert [results(run).out(name, rank) for rank in range(1, run.size)] == [""] * (run.size - 1)
    rate = f"{0.01 / run.size:.6g}"
    assert f"start epoch 1 global train step 0 with effective learning rate {rate} ..." in results(run).out("divided")


@pytest.mark.parametrize("run", [*ALONE, *ALL], ids=str)
def test_a_job_in_one_framework_never_imports_the_other(results: ResultsOf, run: Run) -> None:
    assert (results(run).folder / "frameworks").read_text() == {"torch": "torch", "tensorflow": "keras tensorflow"}[run.framework]


@pytest.mark.parametrize(("framework", "transport"), PAIRS)
def test_a_rank_that_raises_ends_the_job_and_its_traceback_is_shown(
    corpus: Path, tmp_path: Path, framework: str, transport: str
) -> None:
    overrides = {"corpus": corpus, "model": tmp_path / "model", "record": tmp_path / "record", "fault": "raise,1,5"}
    size = 2 if framework == "tensorflow" else 3  # which takes seconds to start
    finished = hvdtrain(CONFIGS[framework], {**overrides, **TRANSPORTS[transport]}, ranks=size)
    assert time.time() - float((tmp_path / "record.fault").read_text()) < PATIENCE
    assert finished.status != 0
    assert "RuntimeError: planted by the test" in finished.err
    told = re.findall(r"rank \d of \d: Traceback", finished.err)
    assert told == [f"rank 1 of {size}: Traceback"]  # the others have nothing to tell
