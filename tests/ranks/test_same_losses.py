"""PyTorch and TensorFlow learn the same: equal initial weights, equal data, plain SGD, 20 steps of the demo."""

import json
from pathlib import Path

import pytest
from launching import ROOT, hvdtrain, launch

STEPS = 20
CONFIGS = {
    "torch": [ROOT / "configs" / "g2p.py", ROOT / "tests" / "toy" / "g2p_weights.py"],
    "tensorflow": [ROOT / "configs" / "g2p_tf.py", ROOT / "tests" / "toy" / "g2p_tf_weights.py"],
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many words that 20 steps of 64 take all of them, and 300 for evaluation."""
    folder = tmp_path_factory.mktemp("words")
    for part, last in (("train", 64 * STEPS - 1), ("dev", 299)):
        source = f"{{'class': '{ROOT}/demos/g2p/words.py:Words', 'part': '{part}'}}"
        finished = launch([ROOT / "tools" / "hdf_dump.py", source, folder / f"{part}.hdf", "--end_seq", last])
        assert finished.status == 0, finished.err
    return folder


@pytest.fixture(scope="module")
def losses(words: Path) -> dict[tuple[str, int], list[float]]:
    """The loss of every step, an epoch each, by framework and number of ranks."""
    found = {}
    for framework, configs in CONFIGS.items():
        for ranks in (1, 2):
            folder = words / f"{framework}-{ranks}"
            overrides: dict[str, object] = {
                "train.files": words / "train.hdf",
                "train.partition_epoch": STEPS,
                "num_epochs": STEPS,
                "max_seqs": 64 // ranks,
                "model": folder / "model",
                "log": folder / "log",
                "num_threads": 1,
                "weights": words / "weights.npz",
                "use_horovod": ranks > 1,
            }
            arguments = ["-m", "hvdtrain", *configs]
            for name, value in overrides.items():
                arguments += [f"++{name}", value]
            finished = launch(arguments, ranks=ranks if ranks > 1 else None, timeout=300)
            assert finished.status == 0, finished.err
            reports = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
            assert [report["steps"] for report in reports] == [1] * STEPS
            found[framework, ranks] = [report["scores"]["train_loss_ctc"] for report in reports]
    return found


@pytest.mark.parametrize("run", [("torch", 2), ("tensorflow", 1), ("tensorflow", 2)])
def test_every_step_has_the_same_loss(losses: dict[tuple[str, int], list[float]], run: tuple[str, int]) -> None:
    reference = losses["torch", 1]
    assert reference[-1] < 0.9 * reference[0]  # it learns
    assert losses[run] == pytest.approx(reference, rel=1e-4)


def test_the_tensorflow_demo_learns_and_reports_error_rates(words: Path, tmp_path: Path) -> None:
    overrides: dict[str, object] = {
        "train.files": words / "train.hdf",
        "dev.files": words / "dev.hdf",
        "eval": None,
        "model": tmp_path / "model",
        "log": tmp_path / "log",
        "num_epochs": 2,
        "max_seqs": 64,
        "num_threads": 1,
    }
    finished = hvdtrain(ROOT / "configs" / "g2p_tf.py", overrides, timeout=300)
    assert finished.status == 0, finished.err
    epochs = [json.loads(line)["scores"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert epochs[1]["train_loss_ctc"] < 0.5 * epochs[0]["train_loss_ctc"]
    assert {"dev_loss_ctc", "dev_loss_per", "dev_loss_wer"} <= set(epochs[1])
    assert 0 < epochs[1]["dev_loss_per"] < 1.0
    # whole words are counted: the rate of 300 words is a multiple of 1/300
    assert epochs[1]["dev_loss_wer"] * 300 == pytest.approx(round(epochs[1]["dev_loss_wer"] * 300), abs=1e-9)
