"""A training of one process, started as a user does, and what it logs about its batches."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from launching import TOY, hvdtrain

from hvdtrain.plugins.schedules.file import read_learning_rate_file


def test_balanced_batches_and_their_padding(corpus: Path, tmp_path: Path) -> None:
    overrides = {"corpus": corpus, "model": tmp_path / "model", "num_epochs": 2, "max_seqs": 5, "balance_ranks": 4}
    finished = hvdtrain(TOY, {**overrides, "record": tmp_path / "ids", "max_seq_length": 11}, timeout=300)
    assert finished.status == 0, finished.err
    assert re.search(r"^train: a full epoch loses \d+ of 231 sequences", finished.out, flags=re.MULTILINE)
    seen = Counter((tmp_path / "ids.0").read_text().split("\n"))
    assert set(seen.values()) == {1}
    reports = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    for epoch, report in enumerate(reports, start=1):
        assert report["num_sequences"] == (len(seen) - 1) // 2
        assert set(report["padding"]) == {"data", "classes", "id"}
        assert 0 < report["padding"]["data"] < 1
        assert report["padding"]["id"] == 0
        assert f"train epoch {epoch}, padding: data {report['padding']['data']:.1%}, " in finished.out


def test_training_on_chunks(corpus: Path, tmp_path: Path) -> None:
    overrides = {"corpus": corpus, "model": tmp_path / "model", "chunking": "4:2"}
    finished = hvdtrain(
        TOY, {**overrides, "evaluated": True, "shuffle_batches": True, "train.seq_ordering": "random_blocks:10"}, timeout=300
    )
    assert finished.status == 0, finished.err
    assert re.search(r"^train: \d+ chunks of 231 sequences$", finished.out, flags=re.MULTILINE)
    (report,) = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert report["num_sequences"] == 231
    assert report["steps"] > 231 / 12


def test_rates_of_steps_and_their_file(corpus: Path, tmp_path: Path) -> None:
    overrides = {
        "corpus": corpus,
        "model": tmp_path / "model",
        "num_epochs": 2,
        "evaluated": True,
        "learning_rates": {1: 0.01, 2: 0.004},
        "learning_rate_schedule": {"class": "linear", "num_warmup_epochs": 0.5, "initial": 0.1},
        "learning_rate_file": tmp_path / "rates" / "file",
    }
    finished = hvdtrain(TOY, overrides, timeout=300)
    assert finished.status == 0, finished.err
    effective = re.findall(r"^start epoch . global train step \d+ with effective learning rate (\S+) ", finished.out, flags=re.M)
    # At the very beginning the warm-up's 0.1; after one of two epochs a third of the way from 0.5 to 2 is gone.
    assert [float(rate) for rate in effective] == pytest.approx([0.001, 0.004 * 2 / 3], rel=1e-4)
    records = read_learning_rate_file(tmp_path / "rates" / "file")
    assert [record.learning_rate for record in records] == [0.01, 0.004]
    reports = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [record.scores for record in records] == [report["scores"] for report in reports]


def test_keys_of_the_learning_rate_that_are_wrong(corpus: Path, tmp_path: Path) -> None:
    wrong = {"relative_error_div_by_old": True, "learning_rate_schedule": {"class": "cosin"}, "newbob_multi_num_epochs": 0}
    finished = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "model", **wrong})
    assert finished.status == 2
    assert set(finished.problems) == {
        "relative_error_div_by_old: unknown-key",
        "learning_rate_schedule.class: unknown-value",
        "newbob_multi_num_epochs: out-of-range",
    }


def test_a_loss_that_is_a_mean_of_the_batch_is_reported(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(
        "import hvdtrain, numpy, torch\n"
        "train = [numpy.ones((length, 2), 'float32') for length in range(1, 7)]\n"
        "max_seqs, num_epochs, learning_rate, dev = 2, 2, 0.1, train\n"
        "def get_model(**_):\n    return torch.nn.Linear(2, 1)\n"
        "def train_step(*, model, extern_data, **_):\n"
        "    losses = model(extern_data['data'].raw_tensor)[extern_data['data'].mask]\n"
        "    hvdtrain.get_run_ctx().mark_as_loss(losses, 'of_frames')\n"
        "    hvdtrain.get_run_ctx().mark_as_loss(losses.mean(), 'mean')\n"
    )
    finished = hvdtrain(config, {"model": tmp_path / "model"})
    assert finished.status == 0, finished.err
    told = [line for line in finished.out.splitlines() if "reduction='none'" in line]
    assert [line.partition(":")[0] for line in told] == ["mean"]


EXPLODES = """
import hvdtrain, numpy, torch

train = [numpy.full((length, 2), length, "float32") for length in range(1, 41)]
max_seqs, num_epochs, num_threads, optimizer = 4, 2, 1, {"class": "sgd"}

def get_model(**_):
    return torch.nn.Linear(2, 1)

def train_step(*, model, extern_data, **_):
    data = extern_data["data"]
    hvdtrain.get_run_ctx().mark_as_loss(model(data.raw_tensor)[data.mask].square() + 1, "error")
"""


@pytest.mark.parametrize("learning_rate", [1e-7, 4e-5])
def test_a_loss_that_explodes_is_a_warning(learning_rate: float, tmp_path: Path) -> None:
    """In the first epoch, too, and of a finite loss only: another one ends the training."""
    (tmp_path / "config.py").write_text(EXPLODES)
    given = {"model": tmp_path / "model", "learning_rate": learning_rate, "log_verbosity": 2, "save_interval_steps": 3}
    ended = hvdtrain(tmp_path / "config.py", given)
    assert ended.status == 0, ended.err
    told = re.findall(r"train_loss_error of epoch (\d) is \S+, more than 1000 times that of (.*?), \S+: training", ended.out)
    assert told == ([] if learning_rate < 1e-6 else [("1", "its first batch"), ("2", "epoch 1")]), ended.out
    assert len(re.findall(f"learning rate {learning_rate:.4g};", ended.out)) == len(told)
    assert ("best so far" in ended.out) == (tmp_path / "best.json").exists() == (not told)
