"""RETURNN's own demos and tests for PyTorch, unmodified: what runs with hvdtrain, and what it refuses. docs/returnn.md has the
table.
"""

import ast
import pickle
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import ROOT, clean_environment, hvdtrain

THEIRS = ROOT / "data" / "returnn"
ENGINE = THEIRS / "tests" / "test_torch_engine.py"
BENCHMARK = THEIRS / "demo-rf-pt-benchmark.py"

pytestmark = [
    pytest.mark.again,
    pytest.mark.skipif(not (ENGINE.exists() and BENCHMARK.exists()), reason="make test-soak fetches them"),
]

WORKS = (
    "test_torch_engine_train",
    "test_torch_engine_forward_simple",
    "test_torch_engine_forward",
    "test_torch_engine_forward_pure_torch_no_model_out",
    "test_torch_forward_raw_strings",
    "test_forward_beam_seq_lens",
    "test_min_seq_len",
    "test_max_seq_len",
    "test_data_loader_oggzip",
    "test_torch_engine_train_lion_optimizer",
)
"""Their own assertions hold, and scores, outputs or batches are those of RETURNN's engine."""

WORKS_BUT = {"test_dynamic_learning_rate": "last_epoch_continuous", "test_torch_engine_train_exception": "Module call stack"}
"""The config works, while the assertion with these words does not hold: RETURNN calls the function of the learning rate once more
at the very end, and names the modules in which a model has raised an exception."""

ROUNDED = {
    "test_torch_engine_bf16": 0.02,  # RETURNN adds losses up in bfloat16
    "test_torch_engine_train_shuffle_batches": None,  # the order is random in every run of RETURNN's
}
"""They work; how far the scores may be apart, if they can be compared."""

REFUSED = {
    "test_torch_engine_train_packed": "(True, [])",  # four trainings of one name: the second is complete already
}

OF_THE_ENGINE = (
    "raw_dict get_batch_size_info forward_dataset_epoch forward_load_epoch start_epoch stop_for_resubmission wandb "
    "save_optimizer "
    "load_optimizer updater init_optimizer_state optimizer_convert torch_profile engine_profile distributed sub_proc_cleanup "
    "finalize_data_loaders cuda_graph optimizer_step pin_memory"
).split()
"""Words in the names of tests about the parts of RETURNN's engine. There is no config in them that hvdtrain could train, or they
ask the engine about it while it trains."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], dict[str, Any]]:
    """By test and program, what it computed."""
    made = tmp_path_factory.mktemp("their_tests") / "results"
    tests = [*WORKS, *WORKS_BUT, *ROUNDED, *REFUSED]
    program = str(Path(__file__).with_name("returnn_engine.py"))
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, program, str(ENGINE.parent), str(made), *tests]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=3000, env=environment)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    programs = ("hvdtrain", "returnn")
    return {
        (test, program): pickle.loads(Path(f"{made}.{test}.{program}").read_bytes()) for test in tests for program in programs
    }


@pytest.mark.parametrize("test", WORKS)
def test_as_with_returnns_engine(results: Mapping[tuple[str, str], dict[str, Any]], test: str) -> None:
    own, theirs = results[test, "hvdtrain"], results[test, "returnn"]
    assert (own["error"], theirs["error"]) == (None, None)
    assert own["scores"] or own["outputs"] or own["batches"]
    assert len(own["scores"]) == len(theirs["scores"])
    for one, other in zip(own["scores"], theirs["scores"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert own["outputs"].keys() == theirs["outputs"].keys()
    for tag, outputs in own["outputs"].items():
        assert outputs.keys() == theirs["outputs"][tag].keys()
        for name, values in outputs.items():
            numpy.testing.assert_array_equal(values, theirs["outputs"][tag][name])
    for one, other in zip(own["batches"], theirs["batches"], strict=True):
        for name in one.keys() & other.keys():
            if test.endswith("_seq_len"):  # of DummyDataset, whose numbers are others
                assert one[name].shape == other[name].shape
            else:
                numpy.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("test", ROUNDED)
def test_but_for_scores(results: Mapping[tuple[str, str], dict[str, Any]], test: str) -> None:
    own, theirs = results[test, "hvdtrain"], results[test, "returnn"]
    assert (own["error"], theirs["error"]) == (None, None)
    assert [one.keys() for one in own["scores"]] == [one.keys() for one in theirs["scores"]]
    if ROUNDED[test] is not None:
        assert own["scores"] == [pytest.approx(one, rel=ROUNDED[test]) for one in theirs["scores"]]


@pytest.mark.parametrize("test", WORKS_BUT)
def test_but_for_an_assertion(results: Mapping[tuple[str, str], dict[str, Any]], test: str) -> None:
    own, theirs = results[test, "hvdtrain"], results[test, "returnn"]
    assert own["error"].startswith("AssertionError")
    assert WORKS_BUT[test] in own["line"]
    assert theirs["error"] is None
    for one, other in zip(own["scores"], theirs["scores"], strict=True):  # RETURNN rounds the finished share of the epoch
        assert one == pytest.approx(other, rel=0.05)


@pytest.mark.parametrize("test", REFUSED)
def test_refused(results: Mapping[tuple[str, str], dict[str, Any]], test: str) -> None:
    assert REFUSED[test] in results[test, "hvdtrain"]["error"]


def test_no_test_is_left_out() -> None:
    names = {one.name for one in ast.parse(ENGINE.read_text()).body if isinstance(one, ast.FunctionDef)}
    tried = {*WORKS, *WORKS_BUT, *ROUNDED, *REFUSED}
    assert names >= tried
    others = {name for name in names if name.startswith("test_")} - tried
    assert [name for name in others if not any(words in name for words in OF_THE_ENGINE)] == []


def test_the_benchmark(tmp_path: Path) -> None:
    """An attention model with a conformer of 87 million parameters: few sequences of its data."""
    shutil.copy(BENCHMARK, tmp_path)
    short = {"num_epochs": 1, "train.num_seqs": 8, "dev.num_seqs": 4, "max_seqs": 4, "num_threads": 1, "device": "cpu"}
    try:
        ended = hvdtrain(tmp_path / BENCHMARK.name, {"model": tmp_path / "exp" / "model", **short, "log_verbosity": 5})
        assert ended.status == 0, ended.err
        assert "relative_error_div_by_old in demo-rf-pt-benchmark.py: neither RETURNN nor hvdtrain reads it" in ended.out
        assert "epoch 1 evaluation: dev: ce " in ended.out
    finally:
        shutil.rmtree(tmp_path / "exp", ignore_errors=True)  # a gigabyte
