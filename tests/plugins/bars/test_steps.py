"""How far training is: lines in files and pipes, a bar on a terminal."""

import os
import pty
import re
import signal
from pathlib import Path

import pytest
from launching import TOY, faults, hvdtrain, mpi_version
from terminal import Terminal, screen

from hvdtrain.plugins.bars.drawn import DrawnSteps
from hvdtrain.plugins.bars.terminal import Terminal as DrawnOn
from hvdtrain.plugins.bars.terminal import open_terminal
from hvdtrain.runtime.log import LogKeys
from hvdtrain.runtime.scores import Scores
from hvdtrain.training.step_log import StepLog, StepReport

ESCAPE = "\x1b"
DRAWN = r"\repoch (\d+)( dev)?: +(\d+)%\|[^|\r]*\| (\d+)/\d+ \[\d\d:\d\d<[\d:?]+, +[\d.?]+(?:step/s|s/step)(.*?)\]"
MPIRUN = ["mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def training(corpus: Path, folder: Path, **keys: object) -> list[str]:
    """A training of 20 steps of a tenth of a second."""
    overrides = {"corpus": corpus, "model": folder / "model", "slow": "['compute', -1]", "log_verbosity": 4, **keys}
    return ["-m", "hvdtrain", str(TOY), *(str(part) for name, value in overrides.items() for part in (f"++{name}", value))]


def test_a_bar_and_the_lines_above_it(corpus: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [*training(corpus, tmp_path, num_epochs=2, evaluated=True), "--color", "never"], columns=150)
    assert terminal.read_to_end() == 0, terminal.text
    drawn = re.findall(DRAWN, terminal.text)
    assert len(drawn) >= 10, terminal.text
    assert {epoch for epoch, *_ in drawn} == {"1", "2"}
    of_first = [(int(step), float(share)) for epoch, dataset, share, step, _ in drawn if epoch == "1" and not dataset]
    assert of_first == sorted(of_first)
    assert len(set(of_first)) >= 5
    assert all(share == round(100 * min(12 * step, 231) / 231) for step, share in of_first if step), "as in lines"
    assert any(re.fullmatch(r", ce [\d.]+, fer [\d.]+, learning rate 0.01", more) for *_, more in drawn), drawn
    left = screen(terminal.text)
    assert not any("step/s" in line or ESCAPE in line for line in left), left
    assert [line.split()[:2] for line in left if " train ce " in line] == [["epoch", "1/2"], ["epoch", "2/2"]]
    assert left[-5] == "Finished training in epoch 2."
    assert left[-4].startswith("goodput: ")
    assert re.match(r"total 0:00:\d\d | best epoch \d: dev ce ", left[-3])
    assert left[-2] == f"    next: python -m hvdtrain report {tmp_path}"
    assert left[-1] == ""


@pytest.mark.slow
def test_under_mpirun(corpus: Path, tmp_path: Path) -> None:
    """Open MPI gives every rank a terminal, wherever its own output goes."""
    arguments = training(corpus, tmp_path, use_horovod=True)
    terminal = Terminal(tmp_path, arguments, launcher=MPIRUN, environment=AS_ROOT, columns=60)
    if not mpi_version().startswith("4."):
        assert terminal.read_to_end() == 0, terminal.text
        assert "\repoch 1: " not in terminal.text, "Open MPI 5 forwards whole lines, so there is no bar"
        assert "epoch 1/1  train ce " in terminal.text
        return
    terminal.read_until(r"\repoch 1: ")
    terminal.resize(50)
    assert terminal.read_to_end() == 0, terminal.text
    bars = [bar.rstrip() for bar in re.findall(r"\r(epoch 1: [^\r\n]*)", terminal.text)]
    assert len(bars) >= 5, terminal.text
    assert all(len(bar) <= 59 for bar in bars)
    assert all(bar.endswith("]") for bar in bars), "no number is cut off"
    assert all(len(bar) <= 49 for bar in bars[-2:]), "the bar follows the size of mpirun's terminal"
    assert "Finished training in epoch 1." in screen(terminal.text)


@pytest.mark.slow
def test_lines_above_the_bar_at_the_highest_verbosity_and_an_error_leave_no_bar(corpus: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, training(corpus, tmp_path, log_verbosity=5, fault="['raise', 0, 19]"), columns=150)
    assert terminal.read_to_end() == 1, terminal.text
    assert len(re.findall(DRAWN, terminal.text)) >= 5
    left = screen(terminal.text)
    assert len([line for line in left if re.match(r"train epoch 1, step \d+, ce ", line)]) == 19
    assert {"Traceback (most recent call last):", "RuntimeError: planted by the test"} <= set(left), left
    assert not any("step/s" in line or "%|" in line for line in left), left


@pytest.mark.slow
def test_no_bar_at_the_lowest_verbosity(corpus: Path, tmp_path: Path) -> None:
    quiet = Terminal(tmp_path, training(corpus, tmp_path, log_verbosity=2, slow="['', -1]"))
    assert quiet.read_to_end() == 0, quiet.text
    assert "%|" not in quiet.text


def test_lines_in_a_pipe(corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "evaluated": True}
    ended = hvdtrain(TOY, keys)
    assert ended.status == 0, ended.err
    assert "%|" not in ended.out + ended.err
    times = r"[\d.]+ sec/step, elapsed \d:\d\d:\d\d, exp. remaining \d:\d\d:\d\d, complete"
    more = r" \| mean ce [\d.]+, fer [\d.]+"
    work = r" \| [\d.]+(?: k)? seq/s, [\d.]+(?: k)? frames/s \| [\d.]+ [MG]B$"
    line = rf"^train epoch 1, step (\d+), ce [\d.]+, fer [\d.]+, {times} ([\d.]+)%{more}{work}"
    of_training = re.findall(line, ended.out, flags=re.M)
    assert [(int(step), float(share)) for step, share in of_training] == [
        (step, round(100 * min(12 * step, 231) / 231, 2)) for step in range(1, 21)
    ]
    of_dev = re.findall(
        rf"^epoch 1 'dev' eval, step (\d+), ce [\d.]+, fer [\d.]+, {times} ([\d.]+)%{more}$", ended.out, flags=re.M
    )
    assert [int(step) for step, _ in of_dev] == list(range(1, 10))
    assert of_dev[-1][1] == "100.00"
    seldom = hvdtrain(TOY, {**keys, "model": tmp_path / "other" / "model", "log_interval": 100})
    assert " sec/step" not in seldom.out
    scores = [re.findall("^epoch 1 (?:score: .*(?=elapsed)|evaluation: .*)", out, flags=re.M) for out in (ended.out, seldom.out)]
    assert len(scores[0]) == 2
    assert scores[0] == scores[1], "telling changes nothing"


@pytest.mark.slow
def test_ctrl_c_leaves_the_terminal_clean(corpus: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, training(corpus, tmp_path, num_epochs=100))
    terminal.read_until(DRAWN)
    terminal.type(b"\x03")
    assert terminal.read_to_end() == 130
    left = screen(terminal.text)
    assert any(re.match(r"stopped by SIGINT in epoch \d+ after step \d+", line) for line in left), left
    assert not any("%|" in line for line in left), left


@pytest.mark.slow
def test_a_kill_leaves_a_terminal_that_works(corpus: Path, tmp_path: Path) -> None:
    """Nothing is switched on that somebody would have to switch off again, such as a hidden cursor."""
    terminal = Terminal(tmp_path, training(corpus, tmp_path, fault="['kill', 0, 7]"))
    assert terminal.read_to_end() == -signal.SIGKILL
    assert re.search(DRAWN, terminal.text), terminal.text
    assert ESCAPE not in terminal.text


PRINTS = """
import sys, time
from hvdtrain.runtime.log import LogKeys, open_log, result
from hvdtrain.training.step_log import StepReport, open_step_log
from hvdtrain.runtime.scores import Scores

class Meter:
    drain_ready = Scores
    peak_memory = None

keys = LogKeys(log_verbosity=4, log_interval=0.0)
open_log(keys, 0, 1)
with open_step_log(keys, 0) as steps:
    steps.begin(1, None, 8)
    for number in range(1, 9):
        time.sleep(0.25)
        steps.step(StepReport(number, number / 8, 0.5, None, Meter()))
        if number == 3:
            print("printed by the config")
        if number == 5:
            print("a warning", file=sys.stderr)
            print("part of ", end="", flush=True)
        if number == 6:
            print("a line")
        if number == 7:
            result("a line of the log")
print("afterwards")
"""


def test_what_others_print_stands_above_the_bar(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, ["-c", PRINTS])
    assert terminal.read_to_end() == 0, terminal.text
    assert {step for _, _, _, step, _ in re.findall(DRAWN, terminal.text)} == set("12345678") | {"0"}
    assert screen(terminal.text) == [
        "printed by the config",
        "a warning",
        "part of a line",
        "a line of the log",
        "afterwards",
        "",
    ]


@pytest.mark.slow
def test_a_terminal_of_80_columns_and_a_file(corpus: Path, tmp_path: Path) -> None:
    """By default: what is shown and where, and in which color; then the same again, when there is nothing left to train."""
    log = tmp_path / "train.log"
    arguments = training(corpus, tmp_path, num_epochs=2, evaluated=True, log_verbosity=3, log=log, slow="['', -1]")
    narrow = Terminal(tmp_path, arguments, columns=80)
    assert narrow.read_to_end() == 0, narrow.text
    green, plain = "\x1b[1;32m", "\x1b[0m"
    assert f"{green}best so far{plain}" in narrow.text
    assert re.search(rf"{re.escape(green)}best epoch \d{re.escape(plain)}: dev ce ", narrow.text)
    left = [line.replace(green, "").replace(plain, "") for line in screen(narrow.text)]
    assert all(len(line) < 80 for line in left if str(tmp_path) not in line), left
    rows = r"epoch (\d)/2  train ce \S+ +fer \S+ +\| dev ce \S+ +fer \S+ +best so far\n +\S+( s)? train, .* \| computing \S+ %"
    assert re.findall(rows, "\n".join(left)) != []
    assert not [line for line in left if re.search(r"finished after|elapsed|step \d|Save model|^first ", line)]
    text = log.read_text()
    assert ESCAPE not in text
    [row] = [line for line in text.splitlines() if line.startswith("          ") and "ends" in line]
    assert len(row) > 80, "one line"
    assert text.count("parameters") == 1
    wide = Terminal(tmp_path, arguments, columns=120, environment={"NO_COLOR": "1"})
    assert wide.read_to_end() == 0, wide.text
    done = screen(wide.text)
    assert done[0] == "Already trained until final epoch 2, nothing to do."
    assert re.match(r"best epoch \d: dev ce ", done[1])
    assert [line for line in done[2:] if not line.startswith("    ")] == [""]
    assert ESCAPE not in wide.text


@pytest.mark.slow
def test_two_ranks_and_a_terminal_of_120_columns(corpus: Path, tmp_path: Path) -> None:
    """Stopped and resumed: where it goes on is a line, and there is no line for each rank."""
    arguments = training(corpus, tmp_path, use_horovod=True, num_epochs=2, evaluated=True, log_verbosity=3)
    terminal = Terminal(tmp_path, arguments, launcher=MPIRUN, environment=AS_ROOT, columns=120)
    terminal.read_until(r"epoch 1/2  train ce ")
    terminal.read_until(r"ends \d\d:\d\d")
    terminal.type(b"\x03")
    terminal.read_to_end()
    again = Terminal(tmp_path, [*arguments, "--color", "never"], launcher=MPIRUN, environment=AS_ROOT, columns=120)
    assert again.read_to_end() == 0, again.text
    left = [
        line for line in screen(again.text) if not re.search("btl_tcp|reachable pairing", line)
    ]  # Open MPI 5 may warn about the host's network
    assert left[0].endswith(f"torch: 2 ranks, 2 on {os.uname().nodename} (CPU)")
    # The checkpoint of epoch 1, or one within epoch 2, if mpirun leaves time to write it.
    assert len([line for line in left if re.match(rf"Loaded {tmp_path}/model\.00[12]\.\S*: training continues", line)]) == 1
    assert len([line for line in left if " seq/s, " in line]) == 1
    assert not [line for line in left if re.search("rank [01]", line) and "computing" not in line]
    assert all(len(line) < 120 for line in left if str(tmp_path) not in line), left


def test_colors_in_a_pipe_on_request(corpus: Path, tmp_path: Path) -> None:
    keys = {"corpus": corpus, "model": tmp_path / "model", "num_epochs": 1, "log_verbosity": 3, "log": tmp_path / "log"}
    plain = hvdtrain(TOY, keys)
    assert ESCAPE not in plain.out
    keys |= {"start_epoch": 1}
    asked = hvdtrain(TOY, keys, options=["--color", "always"])
    assert asked.status == 0, asked.err
    assert "\x1b[33mmodel: training begins with epoch 1: " in asked.out, "a warning"
    assert "\x1b[1;32mbest so far\x1b[0m" in asked.out
    assert ESCAPE not in (tmp_path / "log").read_text()
    wrong = hvdtrain(TOY, keys, options=["--color=often"])
    assert wrong.problems == ("log_color: unknown-value",)


class Meter:
    """Counts how often it is asked for scores."""

    looked = 0

    def drain_ready(self) -> Scores:
        self.looked += 1
        return Scores()

    def peak_memory(self) -> int | None:
        return None


def test_a_bar_looks_at_the_losses_no_more_often_than_lines_do() -> None:
    """Looking at them waits for a GPU."""
    end, inside = pty.openpty()
    with os.fdopen(inside, "w") as stream:
        meter = Meter()
        steps = StepLog(3600.0, DrawnSteps(DrawnOn(stream, inside)))
        steps.begin(1, None, 10**6)
        steps._progress.drawn -= 3600  # a drawing is due
        steps.step(StepReport(1, 0.1, 0.5, None, meter))
        assert os.read(end, 4096).startswith(b"\repoch 1: ")
        assert meter.looked == 0
        steps._progress.reported_at -= 3600
        steps.step(StepReport(2, 0.2, 0.5, None, meter))
        assert meter.looked == 1
        steps.end()
    os.close(end)


def test_a_closed_terminal_does_not_stop_the_training() -> None:
    end, inside = pty.openpty()
    os.system(f"stty cols 80 < {os.ttyname(inside)}")
    stream = os.fdopen(inside, "w")
    with open_terminal(stream) as terminal:
        assert terminal is not None
        bar = terminal.bar(desc="work", total=2)
        assert os.read(end, 4096).startswith(b"\rwork:   0%|")
        os.close(end)
        bar.set_postfix_str("more")
        assert terminal.columns == 79, "as it was"
        bar.close()
    try:
        stream.close()
    except OSError:
        pass


def test_targets_and_their_verbosities() -> None:
    assert LogKeys().targets == {"stdout": 3}
    assert LogKeys(log="a.log", log_verbosity=3).targets == {"a.log": 3, "stdout": 3}
    assert LogKeys(log=["a.log", "|cat"], log_verbosity=[5]).targets == {"a.log": 5, "|cat": 3, "stdout": 3}
    assert LogKeys(log=["stdout", "a.log"], log_verbosity=[4, 5]).targets == {"stdout": 4, "a.log": 5}
    assert faults(LogKeys(log_verbosity=[1, 2]).problems()) == ["log_verbosity: out-of-range"]
