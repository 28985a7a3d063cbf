"""`metrics_file`: the numbers of a training for Prometheus, read with its own parser where that is installed."""

import re
from pathlib import Path

import pytest
from launching import TOY, Finished, hvdtrain, refused

from hvdtrain.plugins.trackers.metrics_file import MetricsFile
from hvdtrain.plugins.trackers.services import RunDescription
from hvdtrain.report.starts import Start
from hvdtrain.settings import read_settings

SAMPLE = re.compile(r'^(hvdtrain_\w+)(\{\w+="(?:[^"\\\n]|\\.)*"(?:,\w+="(?:[^"\\\n]|\\.)*")*\}) (\S+)$')


def train(corpus: Path, folder: Path, **overrides: object) -> Finished:
    keys = {"corpus": corpus, "model": folder / "exp" / "model", "num_epochs": 2, "evaluated": True, "log_interval_steps": 5}
    return hvdtrain(TOY, {**keys, **overrides})


def samples(text: str) -> dict[str, float]:
    """By name and labels, every value of a file; each line has to have the form that the format prescribes."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.match(line)
            assert match is not None, line
            assert f"# TYPE {match[1]} gauge\n" in text
            found[match[1] + match[2].replace('run="exp",', "").replace('run="exp"', "")] = float(match[3])
    return found


def test_a_training_leaves_its_numbers(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "numbers.prom"
    finished = train(corpus, tmp_path, metrics_file=file)
    assert finished.status == 0, finished.err
    assert f"trackers: metrics_file: {file}" in finished.out
    found = samples(file.read_text())
    assert found["hvdtrain_epoch{}"] == 2
    assert found["hvdtrain_step{}"] == 40
    assert found['hvdtrain_status{state="finished"}'] == 1
    assert found['hvdtrain_status{state="running"}'] == 0
    assert found['hvdtrain_score{dataset="dev",score="ce"}'] > 0
    assert found['hvdtrain_running_score{score="ce"}'] > 0
    assert found['hvdtrain_epoch_seconds{activity="compute"}'] > 0
    assert found["hvdtrain_learning_rate{}"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"exp", "numbers.prom"}
    assert not (tmp_path / "exp" / "report.html").exists()


def test_a_file_that_cannot_be_written_is_one_warning(corpus: Path, tmp_path: Path) -> None:
    finished = train(corpus, tmp_path, metrics_file=tmp_path / "missing" / "numbers.prom")
    assert finished.status == 0, finished.err
    assert finished.out.count("metrics_file failed in log_") == 1, finished.out
    assert "Finished training in epoch 2." in finished.out


def test_names_with_any_letters(tmp_path: Path) -> None:
    file = tmp_path / "numbers.prom"
    writer = MetricsFile(file)
    start = Start([("host", "CPU")], {}, 1, 10)
    writer.begin(RunDescription('a "b"\\c', tmp_path, None, 7, {}, {}, start))
    writer.log_epoch(1, 8, {"dev/a\nb": float("inf"), "loss_scale": 2.0})
    text = file.read_text()
    assert 'hvdtrain_score{run="a \\"b\\"\\\\c",dataset="dev",score="a\\nb"} inf\n' in text
    samples(text)
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["hvdtrain_score"].samples[0].labels == {"run": 'a "b"\\c', "dataset": "dev", "score": "a\nb"}


def test_other_names_of_files_are_refused(tmp_path: Path) -> None:
    with refused("metrics_file: wrong-format"):
        read_settings([TOY], {"corpus": str(tmp_path), "model": str(tmp_path / "m"), "metrics_file": "numbers.txt"})
