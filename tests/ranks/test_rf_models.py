"""Models of RETURNN's frontend on two ranks, with RETURNN installed."""

import shutil
from pathlib import Path

import pytest
from launching import ROOT
from rf_words import write_words
from trainings import Run, Trained, assert_same, trains

pytestmark = pytest.mark.slow

WORDS = ROOT / "tests" / "toy" / "rf.config"
DEMO = ROOT / "data" / "returnn" / "demo-rf.config"
ALONE, BOTH = Run("torch", "single", 1), Run("torch", "horovod", 2)


@trains(slow=[ALONE, BOTH])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    write_words(folder)
    words = {
        "configs": [WORDS],
        "folder": folder,
        "max_seqs": 6 // run.size,
        "batch_size": 10_000,
        "num_epochs": 1,
        "num_threads": 1,
    }
    wanted: dict[str, dict[str, object]] = {"layer_norm": {**words, "without_batch_norm": True}}
    if run == ALONE:
        return wanted
    wanted["batch_norm"] = words
    if DEMO.exists():
        shutil.copy(DEMO, folder)  # it writes next to itself
        wanted["demo"] = {
            "configs": [folder / DEMO.name],
            "num_epochs": 1,
            "num_threads": 1,
            "learning_rate_file": folder / "rates",
        }
    return wanted


def test_two_ranks_reach_what_one_reaches(trained: Trained) -> None:
    """A conformer with CTC and an LSTM. Its means are those of all ranks' batches."""
    [alone], [both] = (trained(trainings, run).scores("layer_norm") for run in (ALONE, BOTH))
    assert alone == pytest.approx(both, rel=1e-4)


def test_ranks_have_the_same_weights_and_statistics(trained: Trained) -> None:
    results = trained(trainings, BOTH)
    assert_same(results.weights("batch_norm", 0), results.weights("batch_norm", 1))
    assert any("running_mean" in name for name in results.weights("batch_norm"))


@pytest.mark.skipif(not DEMO.exists(), reason="make test fetches it")
def test_the_demo_of_returnn_itself(trained: Trained) -> None:
    """As it stands, its own data included."""
    [scores] = trained(trainings, BOTH).scores("demo")
    assert scores["dev_loss_ce"] < 0.2
