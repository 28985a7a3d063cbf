"""What holds whatever the framework and the transport: N ranks learn what one rank learns, number by number.

A new transport is a line in TRANSPORTS and its pairs in PAIRS; a new framework is a config like tests/toy/config.py in CONFIGS.
"""

import json
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
from launching import TOY, hvdtrain, launch

CONFIGS = {"torch": TOY, "tensorflow": TOY.with_name("tensorflow_config.py")}

TRANSPORTS: dict[str, dict[str, object]] = {
    "single": {},
    "horovod": {"use_horovod": True},
    "torch.distributed": {"torch_distributed": {"backend": "gloo"}},
}
"""The keys that choose a transport."""

PAIRS = [("torch", "horovod"), ("torch", "torch.distributed"), ("tensorflow", "horovod")]
"""Which transports serve which framework, beside single, which serves all."""

PATIENCE = 10.0
"""Seconds within which the whole job has to end after a rank failed."""


@dataclass(frozen=True)
class Run:
    """One launch."""

    framework: str
    transport: str
    size: int

    def __str__(self) -> str:
        return f"{self.framework}-{self.transport}-{self.size}"

    @property
    def alone(self) -> "Run":
        """The same on one rank."""
        return Run(self.framework, "single", 1)


ALONE = [Run(framework, "single", 1) for framework in CONFIGS]
SEVERAL = [Run(framework, transport, size) for framework, transport in PAIRS for size in (2, 3)]

# One launch does all of a run's trainings; the overrides of each by name. A global batch is 12 sequences for every
# number of ranks, so 231 sequences are 20 steps, in the last of which only one rank has a batch.
IN_PARTS = {"layers": "statistics", "optimizer": {"class": "adam"}}
TRAININGS: dict[str, dict[str, object]] = {
    "sum": {"losses": "sum", "gradient_clip_global_norm": 50.0},
    "mean": {"losses": "mean", "gradient_clip_global_norm": 1.0, "optimizer": {"class": "adam"}},
    "several": {"losses": "several"},
    "mean_average": {"losses": "mean", "horovod_avg_grad": True},
    "grad_average": {"part": "even.hdf", "horovod_avg_grad": True, "optimizer": {"class": "sgd"}},
    "param_every_step": {"part": "even.hdf", "horovod_reduce_type": "param", "optimizer": {"class": "sgd"}},
    "param_every_7": {"horovod_reduce_type": "param", "horovod_param_sync_step": 7, "layers": "statistics", "num_epochs": 2},
    "param_by_time": {"horovod_reduce_type": "param", "horovod_param_sync_time_diff": 0.05, "layers": "statistics"},
    "grad_statistics": {"layers": "statistics", "num_epochs": 2},
    "evaluated": {"learning_rate": 0.0, "evaluated": True, "losses": "several", "max_seqs": 7},
    "by_frames": {"max_seqs": None, "batch_size": 30, "num_epochs": 2, "record": "ids"},
    "balanced": {"max_seqs": 4, "balance_ranks": 6, "num_epochs": 2, "record": "ids"},
    "ordered_alike": {"horovod_dataset_distribution": "random_seed_offset", "num_epochs": 2, "record": "ids"},
    "fewer_than_ranks": {"part": "two.hdf", "max_seqs": 1, "losses": "several", "num_epochs": 3},
    "divided": {"horovod_scale_lr": "divide"},
    "whole": {**IN_PARTS, "num_epochs": 3},
    "first_part": {**IN_PARTS, "num_epochs": 1, "saved_as": "parts"},
    "second_part": {**IN_PARTS, "num_epochs": 3, "saved_as": "parts"},
}

OF_ONE_FRAMEWORK: dict[str, dict[str, dict[str, object]]] = {
    "torch": {},
    "tensorflow": {
        "rows": {"layers": "embedding", "gradient_clip_global_norm": 1.0},
        "rows_averaged": {"layers": "embedding", "horovod_avg_grad": True, "losses": "mean", "optimizer": {"class": "adam"}},
        "rows_fewer_than_ranks": {"layers": "embedding", "part": "two.hdf", "max_seqs": 1, "num_epochs": 3},
    },
}
"""Embeddings whose gradients travel as rows: with TensorFlow."""

NAMES = {
    "torch": {"first": "first.weight", "frozen": "frozen", "unused": "unused", "mean": "norm.running_mean"},
    "tensorflow": {"first": "first.kernel", "frozen": "frozen.kernel", "unused": "unused", "mean": "norm.moving_mean"},
}
"""What each framework's toy model calls the same parameters."""


def trainings(run: Run) -> dict[str, dict[str, object]]:
    return TRAININGS | OF_ONE_FRAMEWORK[run.framework]


class Results:
    """A folder for each run, made when it is first asked for: NAME.rank-RANK.npz, NAME/scores.jsonl, what was printed in out."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        self._corpus = corpus
        self._folder = folder
        self._failed: dict[Run, str | None] = {}

    def folder(self, run: Run) -> Path:
        folder = self._folder / str(run)
        if not folder.exists():
            folder.mkdir()
            self._failed[run] = self._launch(run, folder)
        assert self._failed[run] is None, self._failed[run]
        return folder

    def weights(self, run: Run, name: str, rank: int = 0) -> dict[str, numpy.ndarray]:
        with numpy.load(self.folder(run) / f"{name}.rank-{rank}.npz") as stored:
            return dict(stored)

    def last_scores(self, run: Run, name: str) -> dict[str, float]:
        return self.reports(run, name)[-1]["scores"]

    def reports(self, run: Run, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder(run) / name / "scores.jsonl").read_text().splitlines()]

    def _launch(self, run: Run, folder: Path) -> str | None:
        jobs = []
        for name, given in trainings(run).items():
            overrides = {"corpus": self._corpus, "watchdog_timeout": 150, **TRANSPORTS[run.transport], **given}
            overrides["model"] = folder / str(overrides.pop("saved_as", name)) / "model"
            if "record" in overrides:
                overrides["record"] = folder / f"{name}.ids"
            jobs.append({"name": name, "folder": str(folder), "overrides": {key: str(value) for key, value in overrides.items()}})
        (folder / "jobs.json").write_text(json.dumps(jobs))
        ranks = None if run.transport == "single" else run.size
        command = [TOY.with_name("several.py"), folder / "jobs.json", CONFIGS[run.framework]]
        finished = launch(command, ranks=ranks, timeout=600)
        (folder / "out").write_text(finished.out)
        return finished.err if finished.status else None


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(corpus, tmp_path_factory.mktemp("contract"))


def assert_alike(one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray], tolerance: float) -> None:
    """Equal up to a tolerance relative to each array's largest element."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        difference = numpy.abs(array.astype(float) - other[name].astype(float)).max()
        assert difference <= tolerance * numpy.abs(array.astype(float)).max(), name


def assert_same(one: dict[str, numpy.ndarray], other: dict[str, numpy.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not numpy.array_equal(one[name], other[name])] == []


@pytest.mark.parametrize("run", SEVERAL, ids=str)
def test_weights_after_20_steps_do_not_depend_on_the_number_of_ranks(results: Results, run: Run) -> None:
    for name in ("sum", "mean", "several", "mean_average"):
        assert_alike(results.weights(run.alone, name), results.weights(run, name), 1e-5)
        assert results.last_scores(run, name) == pytest.approx(results.last_scores(run.alone, name), rel=1e-5)
        assert results.reports(run, name)[0]["steps"] == 20


@pytest.mark.parametrize("run", [run for run in SEVERAL if run.framework == "tensorflow"], ids=str)
def test_sparse_gradients_do_not_depend_on_the_number_of_ranks(results: Results, run: Run) -> None:
    for name in ("rows", "rows_averaged"):
        assert_alike(results.weights(run.alone, name), results.weights(run, name), 1e-5)
    assert not numpy.array_equal(results.weights(run, "rows")["table"], results.weights(run, "rows_averaged")["table"])


@pytest.mark.parametrize("run", SEVERAL, ids=str)
def test_all_ranks_end_with_the_same_model(results: Results, run: Run) -> None:
    """Parameters and all buffers, bit for bit; also where an epoch's steps are no multiple of the sync interval."""
    for name in trainings(run):
        first = results.weights(run, name)
        for rank in range(1, run.size):
            assert_same(first, results.weights(run, name, rank))


@pytest.mark.parametrize("run", ALONE, ids=str)
def test_training_changes_the_model_and_leaves_frozen_and_unused_parameters_alone(results: Results, run: Run) -> None:
    names = NAMES[run.framework]
    still, trained = results.weights(run, "evaluated"), results.weights(run, "sum")
    assert not numpy.allclose(still[names["first"]], trained[names["first"]], rtol=1e-3)
    assert numpy.array_equal(still[names["frozen"]], trained[names["frozen"]])
    assert numpy.array_equal(still[names["unused"]], trained[names["unused"]])


@pytest.mark.parametrize("run", SEVERAL, ids=str)
def test_averaging_parameters_after_every_sgd_step_is_averaging_gradients(results: Results, run: Run) -> None:
    assert_alike(results.weights(run, "grad_average"), results.weights(run, "param_every_step"), 1e-5)


@pytest.mark.parametrize("run", SEVERAL, ids=str)
def test_averaging_parameters_is_not_the_same_as_training_alone(results: Results, run: Run) -> None:
    names = NAMES[run.framework]
    alone, together = results.weights(run.alone, "param_every_7"), results.weights(run, "param_every_7")
    assert not numpy.allclose(alone[names["first"]], together[names["first"]], rtol=1e-3)
    assert numpy.abs(together[names["mean"]]).max() > 0


@pytest.mark.parametrize("run", SEVERAL, ids=str)
def test_evaluation_gives_the_same_numbers_on_any_number_of_ranks(results: Results, run: Run) -> None:
    """To the last bit: with a learning rate of zero the models are the same."""
    one, several = results.last_scores(run.alone, "evaluated"), results.last_scores(run, "evaluated")
    dev = {name: value for name, value in one.items() if name.startswith("dev_")}
    assert set(dev) == {"dev_loss_ce", "dev_loss_energy", "dev_loss_first", "dev_loss_fer"}
    assert dev == {name: several[name] for name in dev}


@pytest.mark.parametrize("run", [*ALONE, *SEVERAL], ids=str)
def test_every_sequence_is_trained_on_once_an_epoch(results: Results, run: Run) -> None:
    for name in ("by_frames", "balanced"):
        assert trained_on(results, run, name) == {(epoch, number): 1 for epoch in (1, 2) for number in range(231)}, name


@pytest.mark.parametrize("run", [*ALONE, *SEVERAL], ids=str)
def test_with_random_seed_offset_every_rank_sees_everything_in_its_own_order(results: Results, run: Run) -> None:
    everything = {(epoch, number): run.size for epoch in (1, 2) for number in range(231)}
    assert trained_on(results, run, "ordered_alike") == everything
    orders = {(results.folder(run) / f"ordered_alike.ids.{rank}").read_text() for rank in range(run.size)}
    assert len(orders) == run.size


def trained_on(results: Results, run: Run, name: str) -> Counter[tuple[int, int]]:
    """How often each sequence was trained on in each epoch, over all ranks."""
    lines = [line for rank in range(run.size) for line in (results.folder(run) / f"{name}.ids.{rank}").read_text().splitlines()]
    return Counter((int(line.split()[0]), int(line.split()[1])) for line in lines)


@pytest.mark.parametrize("run", [*ALONE, *SEVERAL], ids=str)
def test_three_epochs_in_one_go_or_in_two(results: Results, run: Run) -> None:
    """Bit for bit, dropout and BatchNorm included; on 3 ranks a sum may be added up in another order the next time."""
    compare = assert_same if run.size < 3 else lambda one, other: assert_alike(one, other, 1e-5)
    compare(results.weights(run, "whole"), results.weights(run, "second_part"))
    assert not numpy.array_equal(*(results.weights(run, name)[NAMES[run.framework]["first"]] for name in ("whole", "first_part")))
    assert "training goes on after epoch 1, step 20." in (results.folder(run) / "out").read_text()


@pytest.mark.parametrize("run", [*ALONE, *SEVERAL], ids=str)
def test_only_rank_0_prints_and_the_scaled_learning_rate_is_told(results: Results, run: Run) -> None:
    out = (results.folder(run) / "out").read_text()
    assert out.count("Finished training in epoch") == len(trainings(run))
    assert f"start epoch 1 global train step 0 with effective learning rate {0.01 / run.size:.6g} ..." in out


@pytest.mark.parametrize("run", [*ALONE, *SEVERAL], ids=str)
def test_a_job_in_one_framework_never_imports_the_other(results: Results, run: Run) -> None:
    assert (results.folder(run) / "frameworks").read_text() == {"torch": "torch", "tensorflow": "keras tensorflow"}[run.framework]


@pytest.mark.parametrize(("framework", "transport"), PAIRS)
def test_a_rank_that_raises_ends_the_job_and_its_traceback_is_shown(
    corpus: Path, tmp_path: Path, framework: str, transport: str
) -> None:
    overrides = {"corpus": corpus, "model": tmp_path / "model", "record": tmp_path / "record", "fault": "raise,1,5"}
    finished = hvdtrain(CONFIGS[framework], {**overrides, **TRANSPORTS[transport]}, ranks=3)
    assert time.time() - float((tmp_path / "record.fault").read_text()) < PATIENCE
    assert finished.status != 0
    assert "RuntimeError: planted by the test" in finished.err
    assert re.findall(r"rank \d of 3: Traceback", finished.err) == ["rank 1 of 3: Traceback"]  # the others have nothing to tell
