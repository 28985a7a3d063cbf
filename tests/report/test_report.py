"""The page about a training, and what it is made of."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from launching import TOY, hvdtrain
from matplotlib import image
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard_events import events
from trainings import Run, Trained, trains

from hvdtrain.report.__main__ import main
from hvdtrain.report.epoch import EpochReport, held_up
from hvdtrain.report.json_lines import as_line
from hvdtrain.report.runs import read_runs
from hvdtrain.report.trackers import TensorBoard, metrics

QUIET = {"data wait": 0.1, "compute": 10.0, "communication": 0.5, "parameter sync": 0.0, "evaluation": 1.0}


def test_who_held_the_others_up() -> None:
    waiting = {**QUIET, "communication": 3.5}
    assert held_up([QUIET]) is None
    assert held_up([QUIET, QUIET, QUIET]) is None
    computing = held_up([waiting, {**QUIET, "compute": 13.0}, waiting])
    assert computing == "rank 1 held the others up by 3.0 s (30%): computing took 13.0 s, against 10.0 s"
    data = held_up([{**QUIET, "data wait": 3.1}, waiting])
    assert data == "rank 0 held the others up by 3.0 s (30%): waiting for data took 3.1 s, against 0.1 s"
    in_parameter_mode = held_up([{**QUIET, "compute": 14.0}, {**QUIET, "parameter sync": 4.0}])
    assert in_parameter_mode is not None
    assert in_parameter_mode.startswith("rank 0 held the others up by 4.0 s")


def test_nobody_is_accused_without_reason() -> None:
    # A little more work than the others; much more, but nobody waited; too short an epoch.
    assert held_up([QUIET, {**QUIET, "compute": 11.0}]) is None
    assert held_up([QUIET, {**QUIET, "compute": 13.0, "communication": 0.4}]) is None
    assert held_up([{"compute": 0.1, "communication": 0.1}, {"compute": 0.2, "communication": 0.0}]) is None


REPORT = EpochReport(
    epoch=3,
    steps=10,
    global_step=30,
    elapsed=12.0,
    computing=0.99,
    learning_rate=0.5,
    num_sequences=100,
    scores={"train_loss_ce": 2.0, "dev_loss_ce": 1.5, "dev_loss_fer": float("nan")},
    padding={"data": 0.25},
    seconds=[{"compute": 10.0}, {"compute": 8.0}],
)


def test_the_time_of_an_epoch_that_was_resumed_is_all_of_it() -> None:
    report = replace(REPORT, elapsed=72.0, seconds=[{"compute": 10.0, "evaluation": 5.0}], seconds_before=62.0)
    assert report.line.startswith("train epoch 3, finished after 10 steps, 0:01:12 elapsed")
    assert (1, "epoch 3 score: ce 2, elapsed: 0:01:17") in report.lines([])
    assert as_line(report)["seconds_before"] == 62.0
    assert "seconds_before" not in as_line(REPORT)


def test_numbers_for_trackers() -> None:
    numbers = metrics(REPORT)
    assert numbers.pop("dev/fer") != numbers.get("dev/fer")
    assert numbers == {
        "train/ce": 2.0,
        "dev/ce": 1.5,
        "learning_rate": 0.5,
        "time/elapsed": 12.0,
        "time/computing_share": 0.99,
        "time/compute": 9.0,
        "time share/compute": 1.0,
        "time of the slowest rank/compute": 10.0,
        "padding/data": 0.25,
    }
    assert metrics(replace(REPORT, sent=100, syncs=2)).items() >= {"exchange/bytes": 100, "exchange/syncs": 2}.items()


def test_what_the_ranks_exchanged_is_a_line() -> None:
    def told(**numbers: int) -> list[str]:
        return [line for _, line in replace(REPORT, **numbers).lines([]) if "exchange" in line]  # type: ignore[arg-type]

    assert told() == []
    assert told(sent=3 << 20) == ["train epoch 3, exchange: 3.0 MB sent by each rank"]
    assert told(sent=3 << 20, syncs=7) == ["train epoch 3, exchange: 7 syncs of parameters, 3.0 MB sent by each rank"]


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "board", step=20)
    board.epoch(REPORT)
    board.epoch(REPORT)
    version, start, *reports = events(tmp_path / "board")
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (20, SessionLog.START)
    assert [report.step for report in reports] == [30, 30]
    values = {value.tag: value.simple_value for value in reports[0].summary.value}
    assert values["dev/ce"] == 1.5
    assert values["learning_rate"] == 0.5
    assert [values[f"time of rank {rank}/compute"] for rank in range(2)] == [10.0, 8.0]


RUNS = [Run("torch", "horovod", size) for size in (1, 2)]


@trains(*RUNS)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """With all reporters."""
    keys = {"num_epochs": 3, "evaluated": True, "use_tensorboard": True, "tracked": folder / f"tracked{run.size}"}
    return {f"run{run.size}": keys}


@pytest.fixture
def one(trained: Trained) -> Path:
    """What a training of one process left."""
    return folder_of(trained, RUNS[0])


@pytest.fixture
def two(trained: Trained) -> Path:
    """What a training on two ranks under Horovod left."""
    return folder_of(trained, RUNS[1])


def folder_of(trained: Trained, run: Run) -> Path:
    made, name = trained(trainings, run), f"run{run.size}"
    assert len(re.findall(r"^train epoch \d, seconds: rank \d: ", made.out(name), flags=re.M)) == 3 * run.size
    return made.models[name].parent


def test_what_a_training_leaves_for_a_report(two: Path) -> None:
    (start,) = [json.loads(line) for line in (two / "starts.jsonl").read_text().splitlines()]
    assert start["settings"]["num_epochs"] == ["3", "the command line"]
    assert start["settings"]["learning_rate"] == ["0.01", "config.py"]
    assert start["settings"]["random_seed"] == ["42", "default"]
    assert [device for _, device in start["hosts"]] == ["CPU", "CPU"]
    assert {"hvdtrain", "Python", "torch", "numpy"} <= set(start["versions"])
    tracked = [json.loads(line) for line in (two.parent / "tracked2").read_text().splitlines()]
    reports = [json.loads(line) for line in (two / "scores.jsonl").read_text().splitlines()]
    assert [one["epoch"] for one in tracked] == [1, 2, 3]
    assert [one["metrics"]["dev/ce"] for one in tracked] == [one["scores"]["dev_loss_ce"] for one in reports]
    boards = events(two / "tensorboard")
    of_epochs = [event.step for event in boards[2:] if any(value.tag == "train/ce" for value in event.summary.value)]
    assert of_epochs == [report["global_step"] for report in reports]


def test_the_page(one: Path, two: Path, tmp_path: Path) -> None:
    page, pictures = tmp_path / "page.html", tmp_path / "pictures"
    assert main([str(one), str(two), "--out", str(page), "--pictures", str(pictures)]) == 0
    text = page.read_text()
    assert not re.search(r"(src|href)=\"?(http|file|/)", text)  # nothing else is needed to look at it
    for expected in ("run1", "run2", "Scores", "ranks of run2", "num_epochs", "the command line", "horovod 0.28.1"):
        assert expected in text
    assert {"ce.png", "learning-rate.png", "time-of-run1.png", "ranks-of-run2.png"} <= {one.name for one in pictures.iterdir()}
    for one in pictures.iterdir():
        assert len(numpy.unique(image.imread(one))) > 10, f"{one} is empty"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_page_in_a_browser(two: Path, tmp_path: Path) -> None:
    assert main([str(two), "--out", str(tmp_path / "page.html")]) == 0
    shot = tmp_path / "page.png"
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1400,1200", f"--screenshot={shot}", f"file://{tmp_path / 'page.html'}"]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    pixels = image.imread(shot)[..., :3]
    # The heading on top, and beneath it two figures side by side, with the colors of their curves.
    figures = pixels[250:]
    for half in (figures[:, :650], figures[:, 700:1350]):
        colors = {tuple(color) for color in numpy.round(half.reshape(-1, 3) * 255).astype(int)}
        assert (0x1F, 0x6F, 0x8B) in colors


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path / 'scores.jsonl'}: expected the file that a training writes beside its model" in capsys.readouterr().err
    (tmp_path / "scores.jsonl").write_text('{"epoch": 1\n')
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path / 'scores.jsonl'}, line 1: expected JSON, got:" in capsys.readouterr().err


def test_names_that_tell_runs_apart(one: Path, two: Path, tmp_path: Path) -> None:
    shutil.copytree(one, tmp_path / "other" / "run1")
    assert [run.name for run in read_runs([one, two])] == ["run1", "run2"]
    assert read_runs([tmp_path / "other" / "run1", one])[0].name == "other/run1"


def test_every_key_in_effect(corpus: Path) -> None:
    finished = hvdtrain(TOY, {"corpus": corpus, "model": "m", "num_epochs": 7}, options=["--print-config"])
    assert finished.status == 0, finished.err
    lines = dict(re.findall(r"^(\S.*?) = .*? # (.*)$", finished.out, flags=re.M))
    assert lines["num_epochs"] == "the command line"
    assert lines["max_seqs"] == "config.py"
    assert lines["gradient_clip"] == "default"
