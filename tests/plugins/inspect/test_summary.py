"""The model layer by layer, and training on a few batches again and again."""

import json
import re
from pathlib import Path

import pytest
from launching import TOY, hvdtrain
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.learner.base import Layer
from hvdtrain.plugins.inspect.layers import as_json, table
from hvdtrain.settings import read_settings
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.overfit import repeat_batches


def test_counts_of_a_layer_have_those_inside_it() -> None:
    layers = [
        Layer("", "Model", {"scale": ()}, frozenset({"scale"})),
        Layer("encoder", "Encoder", {}, frozenset()),
        Layer("encoder.one", "Linear", {"weight": (2, 3), "bias": (2,)}, frozenset({"weight"})),
        Layer("encoder2", "Linear", {"weight": (7,)}, frozenset()),
    ]
    found = as_json(layers, {"encoder.one": [(4, 2), ()]})
    counts = [(row["name"], row["num_parameters"], row["num_trainable"]) for row in found["layers"]]
    assert counts == [("", 16, 7), ("encoder", 8, 6), ("encoder.one", 8, 6), ("encoder2", 7, 0)]
    assert (found["num_parameters"], found["num_trainable"]) == (16, 7)
    assert table(found)[3].split() == ["encoder.one", "Linear", "4x2,", "scalar", "8", "6"]
    assert table(found)[4].split() == ["encoder2", "Linear", "-", "7", "no"]


def test_the_summary_of_a_model(corpus: Path, tmp_path: Path) -> None:
    given = {"corpus": corpus, "model": tmp_path / "model", "layers": "statistics", "evaluated": True, "log_verbosity": 5}
    ended = hvdtrain(TOY, given, options=["--summary"])
    assert ended.status == 0, ended.err
    assert not list(tmp_path.iterdir()), "nothing is written"
    assert re.search(r"^model +WithStatistics +12x\d+x5 +163 +160$", ended.out, re.M), ended.out
    assert re.search(r"^first +Conv1d +12x8x\d+ +104 +yes$", ended.out, re.M)
    assert re.search(r"^dropout +Dropout +12x\d+x4 +0 +-$", ended.out, re.M)
    assert "in all: 163 parameters, 160 of them are trained" in ended.out

    trained = hvdtrain(TOY, given)
    assert re.search(r"^first +Conv1d +- +104 +yes$", trained.out, re.M), "the log has it, too"
    summary = json.loads((tmp_path / "summary.json").read_text())
    [first] = [row for row in summary["layers"] if row["name"] == "first"]
    assert first == {
        "name": "first",
        "type": "Conv1d",
        "parameters": [
            {"name": "weight", "shape": [8, 4, 3], "trainable": True},
            {"name": "bias", "shape": [8], "trainable": True},
        ],
        "num_parameters": 104,
        "num_trainable": 104,
        "output": None,
    }
    [frozen] = [one for one in summary["layers"][0]["parameters"] if one["name"] == "frozen"]
    assert frozen == {"name": "frozen", "shape": [3], "trainable": False}


def sequences_of(record: Path) -> list[list[int]]:
    """The sequences of every step, from a file of trace_sequences."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return [line["indices"] for line in lines if "indices" in line]


def test_overfitting_learns_the_same_batches_by_heart(corpus: Path, tmp_path: Path) -> None:
    given = {"corpus": corpus, "model": tmp_path / "model", "max_seqs": 4, "num_epochs": 4, "learning_rate": 0.005}
    trace = {"trace_sequences": tmp_path / "trace"}
    assert hvdtrain(TOY, given | {"num_epochs": 1}).status == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    ended = hvdtrain(TOY, given | trace, options=["--overfit-batches", "2"])
    assert ended.status == 0, ended.err
    assert "overfit_batches: 2 of 58 batches, again and again; files go to overfit/" in ended.out
    steps = sequences_of(tmp_path / "trace.run-0.rank-0.jsonl")
    assert len(steps) == 4 * 58
    assert steps == [steps[0], steps[1]] * 116
    assert len({*steps[0], *steps[1]}) == 8
    scores = [json.loads(line)["scores"] for line in (tmp_path / "overfit" / "scores.jsonl").read_text().splitlines()]
    assert scores[-1]["train_loss_ce"] < 0.8 * scores[0]["train_loss_ce"], scores
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("trace") and path.name != "overfit")
    assert left == before, "the training itself is as it was"
    again = hvdtrain(TOY, given, options=["--overfit-batches=2"])
    assert "training begins with epoch 1: its first checkpoint replaces" in again.out, "it starts anew"


@pytest.mark.parametrize("number", [1, 3])
def test_every_rank_has_its_own_batches(corpus: Path, tmp_path: Path, number: int) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "max_seqs": 4, "num_threads": 1}
    settings = read_settings([TOY], {name: str(value) for name, value in keys.items()})

    def shares(comm: Communicator) -> list[list[int]]:
        with open_session(settings, "measure", comm) as session:
            feed = repeat_batches(session, number).feeds[0]
            return [batch.tolist() for batch in feed.rank_batches(feed.plan(7))]

    found = on_ranks(2, shares)
    assert sum(map(len, found)) == 58
    for own in found:
        assert own == (own[:number] * 58)[: len(own)]
    assert found[0][0] != found[1][0]
