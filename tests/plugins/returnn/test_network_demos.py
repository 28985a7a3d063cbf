"""RETURNN's own demos for TensorFlow, unmodified, on less data: the same scores as with RETURNN's engine, and what is refused.
docs/returnn.md has the table."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, clean_environment, hvdtrain, launch

THEIRS = ROOT / "data" / "returnn"

pytestmark = [
    pytest.mark.again,
    pytest.mark.skipif(not (THEIRS / "demo-tf-attention.config").exists(), reason="make test-soak fetches them"),
]

EQUAL = {
    "attention": "TaskXmlModelingDataset",
    "chunking-blstm.12ax": "Task12AXDataset",
    "contribrnn-lstm.12ax": "Task12AXDataset",
    "enc-dec": "TaskNumberBaseConvertDataset",
    "native-lstm.12ax": "Task12AXDataset",
    "native-lstm-lowmem.12ax": "Task12AXDataset",
    "native-lstm2.12ax": "Task12AXDataset",
    "native-lstm2.12ax.tuned": "Task12AXDataset",
    "rec-explicit-lstm": "Task12AXDataset",
    "rec-explicit-rnn": "Task12AXDataset",
    "vanilla-lstm.12ax": "Task12AXDataset",
}
"""Demos with RETURNN's scores, and the class of their data."""

REFUSED = {
    "att-copy": r"network: layer 'att_comb' .*expected a layer that RETURNN can build",
    "hard-att-copy": r"network: layer 'energy_in1' .*expected a layer that RETURNN can build, got ValueError: Dimensions",
    "maxgradnorm-lstm.12ax": r"maximize_grad_norm: a key of RETURNN that is not supported",
    "neural-transducer.12ax": r"network: .*unknown layer class 'neural_transducer'",
    "rec-self-att": r"network: layer .*expected a layer that RETURNN can build",
}
"""What hvdtrain says about the others. RETURNN's engine fails with all of them but maxgradnorm."""


def demo(name: str) -> Path:
    return THEIRS / f"demo-tf-{name}.config"


def data_of(name: str, program: str) -> dict[str, str]:
    """Few sequences of the demo's kind, in RETURNN's random order."""
    found = {"class": EQUAL[name], "num_seqs": 100, "seq_ordering": "random"}
    datasets = {"train": found, "dev": {**found, "num_seqs": 20, "fixed_random_seed": 1, "seq_ordering": "default"}}
    if program == "hvdtrain" and EQUAL[name] == "Task12AXDataset":  # hvdtrain's own class has other numbers
        datasets = {part: {"class": "ReturnnDataset", "dataset": given} for part, given in datasets.items()}
    return {part: repr(given) for part, given in datasets.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of every demo with both programs."""
    folder = tmp_path_factory.mktemp("demos")
    # RETURNN reads no chunks of these datasets in its own order; the sequences are shorter than a chunk.
    short = {"num_epochs": "2", "chunking": "0"}
    jobs = []
    for name in EQUAL:
        for program in ("returnn", "hvdtrain"):
            place = folder / program / name
            rates = {"learning_rate_file": str(place / "rates")} if program == "returnn" else {}
            jobs.append([program, str(demo(name)), {**short, **data_of(name, program), **rates, "model": str(place / "model")}])
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(ROOT / "tests" / "toy" / "network_jobs.py"), str(folder / "jobs.json")]
    subprocess.run(command, env=clean_environment() | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, timeout=1800)
    return folder


def theirs(folder: Path, name: str) -> list[dict[str, float]]:
    """RETURNN's scores of each epoch, under hvdtrain's names."""
    rates = folder / "returnn" / name / "rates"
    assert rates.exists(), rates.with_name("out").read_text()[-3000:]
    found = re.findall(r"'(train|dev)_(score|error)': ([\d.e+-]+)", rates.read_text())
    assert len(found) == 8  # 2 epochs
    return [{f"{part}_loss_{kind}": float(value) for part, kind, value in found[first : first + 4]} for first in (0, 4)]


@pytest.mark.parametrize("name", EQUAL)
def test_scores_are_those_of_returnn(folder: Path, name: str) -> None:
    log = folder / "hvdtrain" / name / "scores.jsonl"
    assert log.exists(), log.with_name("out").read_text()[-3000:]
    ours = [json.loads(line)["scores"] for line in log.read_text().splitlines()]
    assert len(ours) == 2
    for expected, scores in zip(theirs(folder, name), ours, strict=True):
        assert scores == pytest.approx(expected, rel=3e-6)


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_train_a_demo(tmp_path: Path, name: str) -> None:
    given = {**data_of(name, "hvdtrain"), "num_epochs": 1, "chunking": "0", "use_horovod": 1, "model": tmp_path / "model"}
    ended = hvdtrain(demo(name), given, ranks=2)
    assert ended.status == 0, ended.err
    [line] = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert {f"{part}_loss_{kind}" for part in ("train", "dev") for kind in ("score", "error")} == json.loads(line)[
        "scores"
    ].keys()


@pytest.mark.parametrize("name", REFUSED)
def test_the_others_are_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    ended = launch(["-m", "hvdtrain", str(demo(name)), "++model", str(tmp_path / "model")])
    assert ended.status == 2
    assert re.search(REFUSED[name], ended.err), ended.err
