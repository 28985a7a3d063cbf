"""What `hvdtrain dump` draws on a terminal: a real one, of the system's kind (pty)."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
from launching import ROOT
from terminal import Terminal, screen

from hvdtrain.cli import main
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.runtime import log
from hvdtrain.runtime import terminal as terminals

CORPUS = """
import time
import numpy

class Slow:
    def __init__(self, seconds, size=60, says=""):
        self.seconds, self.size, self.says = seconds, size, says

    def __len__(self):
        return self.size

    def __iter__(self):
        for number in range(self.size):
            time.sleep(self.seconds / self.size)
            if self.says and number % 20 == 5:
                print(self.says)
            yield f"seq-{number}", {"data": numpy.ones((2, 3), "float32")}

def endless():
    for number in range(100000):
        time.sleep(0.05)
        yield f"seq-{number}", {"data": numpy.ones((2, 3), "float32")}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus.py").write_text(CORPUS)
    return tmp_path


def dump(source: str, *more: str) -> list[str]:
    return ["-m", "hvdtrain", "dump", source, "out.hdf", *more]


DRAWN = r"\r +(\d+)%\|([^|\r]*)\| (\d+)/60 \[(\d\d):(\d\d)<(\d\d):(\d\d), +([\d.]+)(seq/s|s/seq)\]"


def test_a_bar_with_rate_and_remaining_time_and_a_report_at_the_end(folder: Path) -> None:
    terminal = Terminal(folder, dump('{"class": "corpus.py:Slow", "seconds": 3}'))
    assert terminal.read_to_end() == 0, terminal.text
    drawn = re.findall(DRAWN, terminal.text)
    assert len(drawn) >= 4, terminal.text
    done = [int(one[2]) for one in drawn]
    assert done == sorted(set(done))
    for share, bar, number, _, _, minutes, seconds, rate, unit in drawn:
        assert int(share) == pytest.approx(100 * int(number) / 60, abs=0.6)
        assert bar.count("\u2588") == pytest.approx(len(bar) * int(number) / 60, abs=1)
        speed = float(rate) if unit == "seq/s" else 1 / float(rate)
        assert 0 < (int(number) - 1) * speed / int(number) <= 20.5, "each but the first takes a twentieth of a second at least"
        remaining = 60 * int(minutes) + int(seconds)
        assert remaining == pytest.approx((60 - int(number)) / speed, rel=0.1, abs=1.1)
    assert "\rputting the sequences together in out.hdf" in terminal.text
    (report, nothing) = screen(terminal.text)
    assert re.fullmatch(r"out.hdf: 60 sequences, 120 frames of 'data', 0.0 MB in [\d.]+ s", report)
    assert nothing == ""


def test_the_bar_follows_the_width_of_the_terminal_below_what_a_corpus_prints(folder: Path) -> None:
    terminal = Terminal(folder, dump('{"class": "corpus.py:Slow", "seconds": 3, "says": "opening a file"}'), columns=60)
    terminal.read_until(r"(?s)(%\|.*){3}")
    before = len(terminal.text)
    assert all(len(one.rstrip()) <= 59 for one in re.split(r"[\r\n]", terminal.text)), "the last column stays empty"
    terminal.resize(40)
    assert terminal.read_to_end() == 0
    drawn = [one for one in terminal.text[before:].split("\r") if "%|" in one]
    assert drawn
    assert all(len(one.rstrip()) <= 39 for one in drawn[-3:]), drawn
    *above, report, nothing = screen(terminal.text)
    assert above == ["opening a file"] * 3
    assert report.startswith("out.hdf: 60 sequences")


def test_ctrl_c_leaves_nothing_behind(folder: Path) -> None:
    terminal = Terminal(folder, dump("corpus.py:endless"))
    terminal.read_until(r"\r\d+seq \[\d\d:\d\d, +[\d.]+seq/s\]")
    assert len(list(folder.glob(".out.hdf.*"))) == 1
    terminal.type(b"\x03")
    assert terminal.read_to_end() == 130
    assert "interrupted; out.hdf was not written" in screen(terminal.text)
    assert "Traceback" not in terminal.text
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["corpus.py"]


def test_nothing_is_drawn_into_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    assert main(dump('{"class": "corpus.py:Slow", "seconds": 0.5}')[2:]) == 0
    assert capfd.readouterr().err == ""
    assert open_hdf([folder / "out.hdf"]).num_sequences == 60


def test_bars_under_mpirun_open_its_terminal_once(monkeypatch: pytest.MonkeyPatch) -> None:
    end, inside = pty.openpty()
    termios.tcsetwinsize(inside, (24, 80))
    monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were mpirun
    monkeypatch.setattr(terminals, "MPIRUN", (Path("/proc/self/comm").read_text().strip(),))
    terminals._opened_terminal.cache_clear()
    with open(inside, "w") as stream:
        windows = {terminals.terminal_of(stream) for _ in range(3)}
    terminals._opened_terminal.cache_clear()
    assert len(windows - {inside, None}) == 1
    for descriptor in (*windows, end):
        os.close(descriptor)  # type: ignore[arg-type]  # one is a number


def test_a_line_that_cannot_be_printed_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("hvdtrain", logging.INFO, "", 0, "dev wer 0.5 für ä", None, None)
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    log.Screen().emit(record)
    assert ascii_only.buffer.getvalue() == rb"dev wer 0.5 f\xfcr \xe4" + b"\n"
    ascii_only.close()
    for stream in (ascii_only, None, object()):
        monkeypatch.setattr(sys, "stdout", stream)
        log.Screen().emit(record)


def test_a_log_file_that_cannot_be_written_is_named_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = log.LogFile("/dev/full")
    lock, others = cast("Any", file.lock), list[bool]()

    class AnotherFile(logging.Handler):
        """That of a thread which waits for the lock of the first one, while it has its own."""

        def emit(self, record: logging.LogRecord) -> None:
            def wait() -> None:
                others.append(lock.acquire(timeout=1))
                if others[-1]:
                    lock.release()

            thread = Thread(target=wait)
            thread.start()
            thread.join()

    monkeypatch.setattr(log.LOGGER, "handlers", [*log.LOGGER.handlers, AnotherFile()])
    for text in ("one", "two"):
        file.handle(logging.LogRecord("hvdtrain", logging.INFO, "", 0, text, None, None))
    file.stream = None  # type: ignore[assignment]  # what it could not write
    assert others == [True]
    assert caplog.text.count("log: /dev/full cannot be written: [Errno 28] No space left on device") == 1
    assert not capsys.readouterr().err


@pytest.mark.parametrize("streams", [">&-", ">&- 2>&-"])
def test_closed_streams_end_nothing(streams: str) -> None:
    command = f"exec {sys.executable} -m hvdtrain help batch {streams}"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=60, stdin=subprocess.DEVNULL).returncode == 0
