"""Numbers within an epoch: what is recorded, who receives it, and what a training leaves in steps.jsonl and for TensorBoard."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from documented import blocks_of, section
from launching import TOY
from report_pages import lines_of
from tensorboard_events import events

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.plugins.trackers.receivers import step_metrics
from hvdtrain.report.json_lines import StepLines
from hvdtrain.report.steps import StepRecord
from hvdtrain.run import train
from hvdtrain.runtime.scores import Scores
from hvdtrain.runtime.timer import Timer
from hvdtrain.settings import read_settings
from hvdtrain.training.epoch import TrainingEpoch
from hvdtrain.training.step_log import ScoreBuffer, StepLog, StepReport
from hvdtrain.training.step_numbers import StepNumbers

RECORD = StepRecord(
    epoch=2,
    step=3,
    global_step=23,
    progress=0.15,
    elapsed=1.5,
    learning_rate=0.01,
    scores={"ce": 2.0, "fer": nan},
    gradient_norm=inf,
    sequences_per_second=10.0,
    frames_per_second={"data": 100.0},
    memory=None,
    computing=0.75,
    data_wait=0.125,
)
KEYS = [
    "epoch", "step", "progress", "elapsed", "learning_rate", "scores", "gradient_norm", "sequences_per_second",
    "frames_per_second", "memory", "computing", "data_wait",
]  # fmt: skip
"""Of a line of steps.jsonl: others read them."""

PLAN = Plan(numpy.array([2, 0, 1, 3]), numpy.array([0, 1, 3, 4]))
LENGTHS = {"data": numpy.array([5, 6, 7, 100])}


class Meter:
    """A learner's meter with given values."""

    seconds = 0.0
    norm: float | None = None

    def __init__(self) -> None:
        self.coming: list[float] = []

    def step_seconds(self) -> float:
        return self.seconds

    def gradient_norm(self) -> float | None:
        return self.norm

    def peak_memory(self) -> int | None:
        return 1 << 30

    def drain_ready(self) -> Scores:
        result = Scores()
        for value in self.coming:
            result.add("ce", value, 1.0)
        self.coming = []
        return result

    take_scores = drain_ready


class Clock:
    """Of an epoch, in seconds that a test sets."""

    now = 100.0

    def elapsed(self, current: EpochProgress) -> float:
        return self.now


def begin(numbers: StepNumbers, position: int) -> EpochProgress:
    """Begin an epoch that has done batches up to a position; returns its progress."""
    current = EpochProgress(1, 0, position)
    feed = SimpleNamespace(lengths_in=lambda epoch: LENGTHS, sequences_among=len, passes=1)
    numbers.begin(TrainingEpoch(PLAN, current, lambda position: 0.0, 0.5, 0.5, 0.0), feed)  # type: ignore[arg-type]
    return current


def finished(number: int, meter: Meter) -> StepReport:
    return StepReport(number, number / 2, None, None, ScoreBuffer(meter))  # type: ignore[arg-type]


def test_shares_and_rates_are_those_since_the_last_record() -> None:
    meter, timer, clock, got = Meter(), Timer(), Clock(), list[StepRecord]()
    meter.seconds, timer.seconds["data wait"] = 7.0, 1.0  # before: of no interest
    numbers = StepNumbers([got.append], timer, meter, clock)  # type: ignore[arg-type]  # all that it asks for
    current = begin(numbers, 1)
    clock.now, meter.seconds, timer.seconds["data wait"], meter.norm = 104.0, 10.0, 1.5, 3.0
    current.position = 2
    numbers.step(finished(1, meter), {"ce": 1.0})
    clock.now, timer.seconds["parameter sync"] = 106.0, 0.5
    current.position = 3
    numbers.step(finished(2, meter), {"ce": 1.0})
    first, second = got
    assert (first.computing, first.data_wait) == (0.75, 0.125)
    assert (first.sequences_per_second, first.frames_per_second) == (0.5, {"data": 11 / 4})
    assert (first.gradient_norm, first.memory, first.learning_rate) == (3.0, 1 << 30, 0.5)
    assert (second.computing, second.data_wait) == (0.25, 0.0)
    assert (second.sequences_per_second, second.frames_per_second) == (0.5, {"data": 50.0})


def test_a_receiver_that_fails_is_reported_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("hvdtrain.runtime.log.write", lambda level, line: said.append(line))
    got: list[StepRecord] = []

    def fails(record: StepRecord) -> None:
        raise OSError("no space left")

    meter = Meter()
    numbers = StepNumbers([fails, got.append], Timer(), meter, Clock())  # type: ignore[arg-type]
    begin(numbers, 0)
    for step in (1, 2):
        numbers.step(finished(step, meter), {})
    assert said == ["the numbers of step 1 were not recorded, training continues: OSError: no space left"]
    assert [record.step for record in got] == [1, 2]


def logged_by(log: StepLog, steps: int, finish: bool = True) -> list[tuple[int, Mapping[str, float]]]:
    """The steps that a listener gets, of each of which the loss is its number, and the mean losses with them."""
    told: list[tuple[int, Mapping[str, float]]] = []
    meter = Meter()
    tally = ScoreBuffer(meter)
    log.begin(1, None, steps, listener=lambda report, means: told.append((report.number, means)))
    for number in range(1, steps + 1):
        meter.coming.append(float(number))
        log.step(StepReport(number, number / steps, 0.1, None, tally))
        if number == 2:
            assert tally.take_all().means() == {"ce": 1.5}  # for a checkpoint: no line loses it
    if finish:
        tally.take_all()
        log.finish()
    return told


def test_every_n_steps_and_at_the_end() -> None:
    assert logged_by(StepLog(every=3), 7) == [(3, {"ce": 2.0}), (6, {"ce": 5.0}), (7, {"ce": 7.0})]
    assert logged_by(StepLog(every=3), 6) == [(3, {"ce": 2.0}), (6, {"ce": 5.0})]
    assert logged_by(StepLog(0.0), 3) == [(1, {"ce": 1.0}), (2, {"ce": 2.0}), (3, {"ce": 3.0})]
    assert logged_by(StepLog(3600.0), 3) == [(3, {"ce": 2.0})]
    assert logged_by(StepLog(3600.0), 3, finish=False) == []


def test_the_lines_of_steps_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "exp" / "steps.jsonl"
    StepLines(path).step(RECORD)
    [line] = path.read_text().splitlines()  # at once
    read = json.loads(line, parse_constant=pytest.fail)
    assert list(read) == KEYS
    assert read["scores"] == {"ce": 2.0, "fer": "nan"}
    assert (read["gradient_norm"], read["memory"]) == ("inf", None)


def test_lines_of_steps_that_are_trained_again_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = StepLines(path)
    lines.go_on(1, 0)
    assert not path.exists()
    places = [(1, 10), (1, 20), (2, 10), (2, 15), (2, 20), (3, 10)]
    for epoch, step in places:
        lines.step(replace(RECORD, epoch=epoch, step=step))
    with path.open("a") as file:
        file.write('{"epoch": 3, "st')  # by a process that was killed
    left = StepLines(path)
    left.go_on(2, 15)
    left.step(replace(RECORD, epoch=2, step=16))
    assert [(line["epoch"], line["step"]) for line in lines_of(path)] == [*places[:4], (2, 16)]
    assert not list(tmp_path.glob("*.unfinished"))
    StepLines(path).go_on(1, 0)
    assert path.read_text() == ""


def test_numbers_for_trackers() -> None:
    numbers = step_metrics(replace(RECORD, scores={"ce": 2.0}, gradient_norm=None))
    assert numbers == {
        "steps/train/ce": 2.0,
        "steps/learning_rate": 0.01,
        "steps/sequences_per_second": 10.0,
        "steps/frames_per_second/data": 100.0,
        "steps/computing": 0.75,
        "steps/data_wait": 0.125,
    }
    assert step_metrics(replace(RECORD, gradient_norm=5.0))["steps/gradient_norm"] == 5.0


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training of 2 epochs of 20 steps leaves, under a rule for the learning rate of steps."""
    folder = tmp_path_factory.mktemp("steps")
    schedule = {"class": "cosine", "num_warmup_steps": 10}
    keys = {"model": folder / "model", "num_epochs": 2, "learning_rate_schedule": schedule, "log_interval_steps": 6}
    keys |= {"gradient_clip_global_norm": 1.0, "use_tensorboard": True, "learning_rate_file": folder / "rates"}
    keys |= {"chunking": {"data": 5, "classes": 5, "id": 1}, "max_seqs": 24, "log": folder / "log"}
    train(read_settings([TOY], {"corpus": str(corpus), **{name: str(value) for name, value in keys.items()}}))
    return folder


def test_what_a_training_leaves(folder: Path) -> None:
    lines, reports = lines_of(folder / "steps.jsonl"), lines_of(folder / "scores.jsonl")
    steps = reports[0]["steps"]
    places = [*range(6, steps, 6), steps]
    assert [(line["epoch"], line["step"]) for line in lines] == [(epoch, step) for epoch in (1, 2) for step in places]
    assert all(list(line) == KEYS for line in lines)
    of_first, of_second = lines[: len(places)], lines[len(places) :]
    for of_epoch, report in ((of_first, reports[0]), (of_second, reports[1])):
        assert of_epoch[-1]["progress"] == 1.0
        assert [line["elapsed"] for line in of_epoch] == sorted(line["elapsed"] for line in of_epoch)
        assert of_epoch[-1]["elapsed"] <= report["elapsed"]
        assert of_epoch[-1]["learning_rate"] == report["learning_rate"]
        assert all(0 <= line[name] <= 1 for line in of_epoch for name in ("computing", "data_wait"))
        assert all(line["gradient_norm"] > 0 and line["memory"] > 1 << 20 for line in of_epoch)
        assert all(line["sequences_per_second"] > 0 for line in of_epoch)
        assert all(line["frames_per_second"].keys() == {"data", "classes", "id"} for line in of_epoch)
        low, high = (extreme(line["scores"]["ce"] for line in of_epoch) for extreme in (min, max))
        assert low <= report["scores"]["train_loss_ce"] <= high
    board = [event for event in events(folder / "tensorboard")[2:] if event.summary.value[0].tag.startswith("steps/")]
    assert [event.step for event in board] == [*places, *(steps + step for step in places)]
    drawn = {value.tag: value.simple_value for value in board[-1].summary.value}
    assert drawn["steps/train/ce"] == pytest.approx(lines[-1]["scores"]["ce"])
    assert drawn["steps/gradient_norm"] == pytest.approx(lines[-1]["gradient_norm"])


def test_the_learning_rate_is_the_one_that_was_used(folder: Path) -> None:
    reports = lines_of(folder / "scores.jsonl")
    steps = reports[0]["steps"]
    [chunks] = map(int, re.findall(r"^train: (\d+) chunks of", (folder / "log").read_text(), flags=re.M))

    def used(step: int) -> float:
        """Of an update that comes after so many steps, of 24 chunks each but for an epoch's last."""
        if step < 10:
            return 0.01 * (step + 1) / 10
        done = step // steps + 24 * (step % steps) / chunks
        warmup = 10 * done / step  # in epochs
        return float(0.01 * 0.5 * (1 + numpy.cos(numpy.pi * (done - warmup) / (2 - warmup))))

    for epoch, report in enumerate(reports):
        rates = [used(epoch * steps + step) for step in range(steps)]
        found = report["learning_rates"]
        assert report["learning_rate"] == pytest.approx(rates[-1])
        assert found["first"] == pytest.approx(rates[0])
        assert (found["lowest"], found["highest"]) == pytest.approx((min(rates), max(rates)))
        assert found["mean"] == pytest.approx(numpy.mean(rates))
        assert report["epoch_learning_rate"] == 0.01
    log = (folder / "log").read_text()
    assert re.findall(r"^train epoch 1, learning rate: from 0.001 to (0.00\d+), at most 0.01, mean (0.00\d+)$", log, flags=re.M)
    assert re.findall(r"^start epoch 2 .* with effective learning rate (0.00\d+) \.\.\.$", log, flags=re.M)
    noted = (folder / "rates").read_text()
    assert noted.count("learningRate=0.01,") == 2, "what newbob goes by"
    last = [float(rate) for rate in re.findall(r"':meta:effective_learning_rate': ([\d.e-]+),", noted)]
    assert last == [report["learning_rate"] for report in reports]


def test_without_a_rule_for_steps_there_is_one_rate(corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "part": "two.hdf", "max_seqs": 1, "model": tmp_path / "model", "learning_rates": "[0.5, 0.25]"}
    keys |= {"num_epochs": 3, "log_interval": 3600, "log": tmp_path / "log"}
    train(read_settings([TOY], {name: str(value) for name, value in keys.items()}))
    reports = lines_of(tmp_path / "scores.jsonl")
    assert [report["learning_rate"] for report in reports] == [0.5, 0.25, 0.25]
    assert not {"learning_rates", "epoch_learning_rate"} & set(reports[0])
    assert not re.findall(r"^train epoch \d, learning rate", (tmp_path / "log").read_text(), flags=re.M)
    found = [(line["step"], line["learning_rate"], line["gradient_norm"]) for line in lines_of(tmp_path / "steps.jsonl")]
    assert found == [(2, 0.5, None), (2, 0.25, None), (2, 0.25, None)], "one at the end of an epoch, however short it is"


def test_the_example_in_the_documents(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exp").mkdir()
    shutil.copytree(folder, tmp_path / "exp" / "g2p")
    monkeypatch.chdir(tmp_path)
    shown, code = blocks_of(section("reports.md", "Numbers within an epoch"))[:2]
    assert (shown.language, list(json.loads(shown.code))) == ("json", KEYS)
    exec(code.code, {})
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert len(printed) == len(lines_of(folder / "steps.jsonl"))
    assert all(re.fullmatch(r"epoch \d\.\d\d: ce [\d.]+, fer [\d.]+, rate [\d.e-]+", line) for line in printed), printed
