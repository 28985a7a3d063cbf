"""The page about a training, and what it is made of."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy
import pytest
from launching import TOY, hvdtrain
from matplotlib import image
from report_pages import REPORT, lines_of, run_folder, shown
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard_events import events
from trainings import Run, Trained, trains

from hvdtrain.plugins.goodput.spent import Spent
from hvdtrain.plugins.report import page
from hvdtrain.plugins.report.__main__ import main
from hvdtrain.plugins.report.plots import MAX_POINTS, decimate, score_figures, time_figures
from hvdtrain.plugins.report.runs import read_runs
from hvdtrain.plugins.report.serve import open_server
from hvdtrain.plugins.report.slow_ranks import log_lines, straggler_line
from hvdtrain.plugins.trackers.receivers import TensorBoard, metrics
from hvdtrain.report.json_lines import as_line
from hvdtrain.report.starts import Start, append_start

QUIET = {"data wait": 0.1, "compute": 10.0, "communication": 0.5, "parameter sync": 0.0, "evaluation": 1.0}


def test_who_held_the_others_up() -> None:
    waiting = {**QUIET, "communication": 3.5}
    assert straggler_line([QUIET]) is None
    assert straggler_line([QUIET, QUIET, QUIET]) is None
    computing = straggler_line([waiting, {**QUIET, "compute": 13.0}, waiting])
    assert computing == "rank 1 held the others up by 3.0 s (30%): computing took 13.0 s, against 10.0 s"
    data = straggler_line([{**QUIET, "data wait": 3.1}, waiting])
    assert data == "rank 0 held the others up by 3.0 s (30%): waiting for data took 3.1 s, against 0.1 s"
    in_parameter_mode = straggler_line([{**QUIET, "compute": 14.0}, {**QUIET, "parameter sync": 4.0}])
    assert in_parameter_mode is not None
    assert in_parameter_mode.startswith("rank 0 held the others up by 4.0 s")


def of_many_ranks(size: int = 1000) -> list[dict[str, float]]:
    """The seconds of ranks of which one waits for its data."""
    return [{**QUIET, "data wait": 3.1} if rank == 517 else {**QUIET, "communication": 3.5} for rank in range(size)]


def test_of_many_ranks_the_log_has_the_median_and_the_slowest() -> None:
    lines = [line for _, line in log_lines(replace(REPORT, seconds=of_many_ranks()))]
    [usual, slowest] = [line for line in lines if ", seconds: " in line]
    assert usual.startswith("train epoch 3, seconds: median of 1000 ranks: data wait 0.1, compute 10.0, communication 3.5, ")
    assert slowest.startswith("train epoch 3, seconds: slowest, rank 517: data wait 3.1, compute 10.0, communication 0.5, ")
    assert slowest.endswith("; waiting for data took 3.0 s longer than usual")
    assert "train epoch 3: rank 517 held the others up by 3.0 s (30%): waiting for data took 3.1 s, against 0.1 s" in lines
    few = [line for _, line in log_lines(replace(REPORT, seconds=of_many_ranks()[:8])) if ", seconds: rank " in line]
    assert len(few) == 8


def test_reports_of_many_ranks_are_complete_and_can_be_read(tmp_path: Path) -> None:
    seconds = of_many_ranks()
    line = as_line(replace(REPORT, seconds=seconds))
    assert line["seconds"] == seconds
    (tmp_path / "scores.jsonl").write_text(json.dumps(line) + "\n")
    [run] = read_runs([tmp_path])
    figures = {figure.name: figure for figure in time_figures(run)}
    bars, heat = figures["ranks"].bars, figures["stragglers"].heat
    assert bars is not None
    assert heat is not None
    assert len(bars.labels) == len(heat.ranks) == 64
    assert 517 in heat.ranks
    assert figures["ranks"].note.endswith("; the 64 slowest of 1000 ranks")
    board = TensorBoard(tmp_path / "board", step=0)
    board.epoch(replace(REPORT, seconds=seconds))
    tags = {value.tag for event in events(tmp_path / "board") for value in event.summary.value}
    assert "time of the slowest rank/data wait" in tags
    assert not [tag for tag in tags if tag.startswith("time of rank ")]


def test_no_rank_is_blamed_without_reason() -> None:
    # A little more work than the others; much more, but no rank waited; too short an epoch.
    assert straggler_line([QUIET, {**QUIET, "compute": 11.0}]) is None
    assert straggler_line([QUIET, {**QUIET, "compute": 13.0, "communication": 0.4}]) is None
    assert straggler_line([{"compute": 0.1, "communication": 0.1}, {"compute": 0.2, "communication": 0.0}]) is None


def test_the_time_of_an_epoch_that_was_resumed_is_all_of_it() -> None:
    report = replace(REPORT, elapsed=72.0, seconds=[{"compute": 10.0, "evaluation": 5.0}], seconds_before=62.0)
    assert report.line.startswith("train epoch 3, finished after 10 steps, 0:01:12 elapsed")
    assert "epoch 3 score: ce 2, elapsed: 0:01:17" in report.score_lines([])
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
    def exchange_lines(**numbers: int) -> list[str]:
        return [line for _, line in replace(REPORT, **numbers).training_lines() if "exchange" in line]  # type: ignore[arg-type]

    assert exchange_lines() == []
    assert exchange_lines(sent=3 << 20) == ["train epoch 3, exchange: 3.0 MB sent by each rank"]
    assert exchange_lines(sent=3 << 20, syncs=7) == ["train epoch 3, exchange: 7 syncs of parameters, 3.0 MB sent by each rank"]


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "board", step=20)
    board.epoch(REPORT)
    board.epoch(REPORT)
    version, start, *reports = events(tmp_path / "board")
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (21, SessionLog.START)
    assert [report.step for report in reports] == [30, 30]
    values = {value.tag: value.simple_value for value in reports[0].summary.value}
    TensorBoard(tmp_path / "board", step=30).epoch(replace(REPORT, global_step=40))
    read = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.step for event in read.Scalars("dev/ce")][-2:] == [30, 40], "a resume hides no epoch"
    assert values["dev/ce"] == 1.5
    assert values["learning_rate"] == 0.5
    assert [values[f"time of rank {rank}/compute"] for rank in range(2)] == [10.0, 8.0]


TWO = Run("torch", "horovod", 2)
KEYS: dict[str, object] = {"num_epochs": 2, "evaluated": True, "use_tensorboard": True}


@trains(TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """With all reporters."""
    return {"two": {**KEYS, "tracked": folder / "tracked"}}


@pytest.fixture
def two(trained: Trained) -> Path:
    """What a training on two ranks under Horovod left."""
    made = trained(trainings, TWO)
    assert len(re.findall(r"^train epoch \d, seconds: rank \d: ", made.out("two"), flags=re.M)) == 4
    return made.models["two"].parent


@pytest.fixture(scope="module")
def one(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training of one process left."""
    folder = tmp_path_factory.mktemp("alone") / "one"
    finished = hvdtrain(TOY, {**KEYS, "corpus": corpus, "model": folder / "model"})
    assert len(re.findall(r"^train epoch \d, seconds: rank 0: ", finished.out, flags=re.M)) == 2
    return folder


def test_what_a_training_leaves_for_a_report(two: Path) -> None:
    [start] = lines_of(two / "starts.jsonl")
    assert start["settings"]["num_epochs"] == ["2", "the command line"]
    assert start["settings"]["learning_rate"] == ["0.01", "config.py"]
    assert start["settings"]["random_seed"] == ["42", "default"]
    assert [device for _, device in start["hosts"]] == ["CPU", "CPU"]
    assert {"hvdtrain", "Python", "torch", "numpy"} <= set(start["versions"])
    tracked, reports = lines_of(two.parent / "tracked"), lines_of(two / "scores.jsonl")
    assert [one["epoch"] for one in tracked] == [1, 2]
    assert [one["metrics"]["dev/ce"] for one in tracked] == [one["scores"]["dev_loss_ce"] for one in reports]
    boards = events(two / "tensorboard")
    of_epochs = [event.step for event in boards[2:] if any(value.tag == "train/ce" for value in event.summary.value)]
    assert of_epochs == [report["global_step"] for report in reports]


def test_no_button_sends_a_figure_away() -> None:
    script = (Path(page.__file__).parent / "page.js").read_text()
    assert '"sendChartToCloud"' in script
    assert 'plotlyServerURL: ""' in script
    assert "form-action 'none'" in page.POLICY


def test_the_page_shows_what_the_files_say(one: Path, two: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main([str(two), "--out", str(page)]) == 0
    text, reports, steps = page.read_text(), lines_of(two / "scores.jsonl"), lines_of(two / "steps.jsonl")
    assert not re.search(r"(src|href)=\"?(http|file|/)", text.partition("<script type=text/plain")[0])  # needs nothing else
    figures = shown(page)
    (dev,) = [curve for curve in figures["score ce"]["panels"][0]["curves"] if curve["name"] == "dev"]
    assert dev["y"] == [report["scores"]["dev_loss_ce"] for report in reports]
    assert dev["y"][dev["best"]] == min(dev["y"])
    assert dev["x"]["step"] == [report["global_step"] for report in reports]
    assert len(steps) > len(reports)
    assert figures["score ce"]["panels"][1]["curves"][0]["y"] == [step["learning_rate"] for step in steps]
    compute = next(values for name, _, values in figures["time"]["bars"]["series"] if name == "compute")
    assert compute == pytest.approx([sum(rank["compute"] for rank in report["seconds"]) / 2 for report in reports])
    assert figures["ranks"]["bars"]["labels"] == ["rank 0", "rank 1"]
    summary = json.loads((two / "summary.json").read_text())
    assert f"{summary['num_parameters']:,} parameters in {len(summary['layers'])} layers" in text
    assert all(f"<code>{layer['name']}</code>" in text for layer in summary["layers"] if layer["name"])
    assert "class TinyModel" in text or "def get_model" in text, "the config's text"

    assert main([str(one), "--out", str(page)]) == 0
    assert main([str(one / "model")]) == 0, "the value of the key model"
    assert (one / "report.html").exists()
    assert not {"ranks", "stragglers"} & set(shown(page)), "one rank cannot be compared with others"
    assert main([str(one), str(two), "--out", str(page)]) == 0
    assert {"score ce", "time of runs", "ranks of two", "time of one"} <= set(shown(page))
    for expected in ("What differs between the runs", "use_horovod", "the command line", "horovod 0.28.1"):
        assert expected in page.read_text()


@pytest.mark.slow
def test_every_figure_as_a_picture(two: Path, tmp_path: Path) -> None:
    page, pictures = tmp_path / "page.html", tmp_path / "pictures"
    assert main([str(two), "--out", str(page), "--pictures", str(pictures)]) == 0
    assert {picture.stem.replace("-", " ") for picture in pictures.iterdir()} == set(shown(page))
    for picture in pictures.iterdir():
        assert len(numpy.unique(image.imread(picture))) > 10, f"{picture} is empty"


def test_steps_within_epochs(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=4)
    with (folder / "steps.jsonl").open("a") as file:  # killed in epoch 2, went on from its second step, and writes right now
        file.write('{"epoch": 2, "st\n[1]\n{"epoch": 2, "step": 2}\n')
        file.write('{"epoch": 2, "step": 3, "progress": 0.75, "learning_rate": 0.7, "scores": {"ce": "nan"}}\n{"epoch": 2, "ste')
    (run,) = read_runs([folder])
    assert [(line["epoch"], line["step"]) for line in run.steps] == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3)]
    main_panel, rates = score_figures([run])[0].panels
    within = main_panel.curves[0]
    assert within.y == [-1, -2, -3, -4, -1, -2]  # without the one that is not a number
    assert within.x["epoch"] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    assert within.x["step"] == [1, 2, 3, 4, 11, 12]
    assert within.x["seconds"] == [0.5, 1, 1.5, 2, 10.5, 11]
    assert rates.curves[0].y == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.7])


def test_steps_at_the_ends_of_epochs_only(tmp_path: Path) -> None:
    """In short epochs: such a curve would be nearly that of the epochs. A single point is drawn, not only the line from it."""
    (run,) = read_runs([run_folder(tmp_path / "run", steps=1)])
    panel, rates = score_figures([run])[0].panels
    assert [curve.look for curve in panel.curves] == ["line"] * len(panel.curves)
    assert [(curve.look, len(curve.y)) for curve in rates.curves] == [("steps", 2)]
    first = replace(run, epochs=run.epochs[:1], steps=run.steps[:1])
    assert [(curve.look, len(curve.y)) for curve in score_figures([first])[0].panels[1].curves] == [("line", 1)]


def test_the_bar_of_an_epoch_that_was_resumed_is_as_long_as_it_took(tmp_path: Path) -> None:
    (run,) = read_runs([run_folder(tmp_path / "run")])
    of_start = time_figures(run)[0].bars
    assert of_start is not None
    resumed = replace(run, epochs=[run.epochs[0], {**run.epochs[1], "seconds_before": 7.0}])
    of_both = time_figures(resumed)[0].bars
    assert of_both is not None
    assert [*of_both.series] == [*of_start.series, ("earlier start", len(of_start.series), [0.0, 7.0])]


def test_a_long_curve_keeps_its_peaks() -> None:
    values = numpy.random.default_rng(1).normal(size=100_000).tolist()
    kept = decimate(values)
    assert len(kept) <= MAX_POINTS
    assert {values.index(min(values)), values.index(max(values)), 0, len(values) - 1} <= set(kept)


def test_what_a_config_says_stays_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    folder = run_folder(tmp_path / "a&b <i>")
    line = as_line(replace(REPORT, scores={f"dev_loss_{evil}": 1.0, "dev_loss_ce": float("inf")}))
    (folder / "scores.jsonl").write_text(json.dumps(line) + "\n")
    start = Start([(evil, evil)], {evil: (evil, evil)}, 1, 5, {evil: evil}, evil, evil, evil, {evil: evil})
    append_start(folder, start)
    assert main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "alert(1)" in text
    assert "<img" not in text
    assert "<script>alert" not in text
    assert "a&amp;b &lt;i&gt;" in text


def test_goodput_and_operations_are_on_the_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    goodput = Spent(useful=90.0, start=6.0, repeated=4.0, starts=2, failures=1).entries()
    flops = {"epoch": 4e12, "step": 2e10, "peak": 1.2e11, "share": 0.415}
    (folder / "scores.jsonl").write_text(json.dumps(as_line(replace(REPORT, goodput=goodput, measures={"flops": flops}))) + "\n")
    assert main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "<b>0:01:40</b><span class=note>" in text
    assert "<b>41.5%</b><span class=note>of 120 GFLOP/s; 20 GFLOP a step</span>" in text
    (run,) = read_runs([folder])
    assert run.epochs[0]["goodput"] == goodput


def test_served_to_this_machine_only(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()  # a training that has not written anything yet
    server, address = open_server([folder], 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def get(path: str, host: str = "localhost:8080") -> tuple[int, str]:
        try:
            with urlopen(Request(path, headers={"Host": host}), timeout=60) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    try:
        assert server.server_address[0] == "127.0.0.1"
        status, text = get(address)
        assert status == 200
        assert "data-live" in text
        if shutil.which("chromium") is not None:  # its script runs, under the policy that the server sends
            command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
            command += ["--virtual-time-budget=8000", "--dump-dom", address]
            drawn = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
            assert re.search(r'id="live" class="stopped">not running, as of ', drawn)
        first = json.loads(get(f"{address}data.json")[1])
        assert get(f"{address}data.json?have={first['version']}") == (204, "")
        shutil.copytree(run_folder(tmp_path / "other", steps=3), folder, dirs_exist_ok=True)
        now = json.loads(get(f"{address}data.json?have={first['version']}")[1])
        assert "score ce" in [figure["name"] for figure in now["figures"]]
        root = address.rsplit("/", 2)[0]
        for wrong in ("/", "/data.json", "/x/data.json"):
            assert get(root + wrong) == (404, "")
        for wrong in ("scores.jsonl", "../../etc/passwd"):
            assert get(address + wrong) == (404, "")
        assert get(address, host="evil.example") == (404, "")
        (folder / "scores.jsonl").write_text("damaged\n")
        assert get(f"{address}data.json")[0] == 503
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_ctrl_c_ends_the_server(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "hvdtrain.plugins.report", str(run_folder(tmp_path / "run")), "--serve"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path / 'scores.jsonl'}: expected the file that a training writes next to its model" in capsys.readouterr().err
    (tmp_path / "scores.jsonl").write_text('{"epoch": 1\n')
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path / 'scores.jsonl'}, line 1: expected JSON, got:" in capsys.readouterr().err
    out = tmp_path / "none" / "page.html"
    assert main([str(run_folder(tmp_path / "run")), "--out", str(out)]) == 2
    assert f"{out}: expected a file that can be written, got: No such file or directory" in capsys.readouterr().err


def test_names_that_tell_runs_apart(one: Path, two: Path, tmp_path: Path) -> None:
    shutil.copytree(one, tmp_path / "other" / "one")
    assert [run.name for run in read_runs([one, two])] == ["one", "two"]
    assert read_runs([tmp_path / "other" / "one", one])[0].name == "other/one"
