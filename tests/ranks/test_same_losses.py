"""PyTorch and TensorFlow learn the same: equal initial weights, equal data, plain SGD, 20 steps of the demo."""

from pathlib import Path

import pytest
from launching import ROOT
from trainings import Run, Trained, marked, trains
from words import LAST, words_in

STEPS = 20
CONFIGS = {
    "torch": [ROOT / "configs" / "g2p.py", ROOT / "tests" / "toy" / "g2p_weights.py"],
    "tensorflow": [ROOT / "configs" / "g2p_tf.py", ROOT / "tests" / "toy" / "g2p_tf_weights.py"],
}
FIRST = Run("torch", "horovod", 1)  # which writes the initial weights
TWO, OF_TENSORFLOW = Run("torch", "horovod", 2), Run("tensorflow", "horovod", 1)
BOTH = Run("tensorflow", "horovod", 2)  # test_contract.py compares them with one rank


@trains(FIRST)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """An epoch for every step, of which 20 with 64 words take all of them."""
    words = words_in(folder.parent.parent)
    keys: dict[str, object] = {
        "configs": CONFIGS[run.framework],
        "train.files": words / "train.hdf",
        "train.partition_epoch": STEPS,
        "num_epochs": STEPS,
        "max_seqs": 64 // run.size,
        "log": folder / "log",
        "num_threads": 1,
        "weights": words / "weights.npz",
    }
    return {"demo": keys}


@trains(TWO, slow=[OF_TENSORFLOW], again=[BOTH], after=FIRST)
def others(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    return trainings(run, folder)


@trains(slow=[OF_TENSORFLOW])
def whole_demo(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    words = words_in(folder.parent.parent)
    keys: dict[str, object] = {
        "configs": [ROOT / "configs" / "g2p_tf.py"],
        "train.files": words / "train.hdf",
        "dev.files": words / "dev.hdf",
        "eval": None,
        "log": folder / "log",
        "num_epochs": 2,
        "max_seqs": 64,
        "num_threads": 1,
    }
    return {"whole": keys}


@pytest.mark.parametrize("run", [TWO, *marked([OF_TENSORFLOW], pytest.mark.slow), *marked([BOTH])], ids=str)
def test_every_step_has_the_same_loss(trained: Trained, run: Run) -> None:
    assert (LAST["train"] + 1) == 64 * STEPS
    reference, other = trained(trainings, FIRST), trained(others, run)
    for results in (reference, other):
        assert [report["steps"] for report in results.reports("demo")] == [1] * STEPS
    losses = [[scores["train_loss_ctc"] for scores in results.scores("demo")] for results in (reference, other)]
    assert losses[0][-1] < 0.9 * losses[0][0]  # it learns
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_the_tensorflow_demo_learns_and_reports_error_rates(trained: Trained) -> None:
    epochs = trained(whole_demo, OF_TENSORFLOW).scores("whole")
    assert epochs[1]["train_loss_ctc"] < 0.5 * epochs[0]["train_loss_ctc"]
    assert {"dev_loss_ctc", "dev_loss_per", "dev_loss_wer"} <= set(epochs[1])
    assert 0 < epochs[1]["dev_loss_per"] < 1.0
    # whole words are counted: the rate of 300 words is a multiple of 1/300
    assert epochs[1]["dev_loss_wer"] * 300 == pytest.approx(round(epochs[1]["dev_loss_wer"] * 300), abs=1e-9)
