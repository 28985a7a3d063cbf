"""What tools/hdf_dump.py draws on a terminal: a real one, of the system's kind (pty)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT
from terminal import Terminal, screen

from hvdtrain.data.hdf.dataset import open_hdf

CORPUS = """
import time
import numpy

class Slow:
    def __init__(self, seconds, size=60):
        self.seconds, self.size = seconds, size

    def __len__(self):
        return self.size

    def __iter__(self):
        for number in range(self.size):
            time.sleep(self.seconds / self.size)
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
    return [str(ROOT / "tools" / "hdf_dump.py"), source, "out.hdf", *more]


def test_a_bar_with_rate_and_remaining_time_and_a_report_at_the_end(folder: Path) -> None:
    terminal = Terminal(folder, dump('{"class": "corpus.py:Slow", "seconds": 3}'))
    assert terminal.read_to_end() == 0, terminal.text
    drawn = re.findall(
        r"\r\[(#*)(\.*)\] +([\d.]+)%  (\d+) of 60 sequences, ([\d.]+)/s, (\d+):(\d\d):(\d\d) remaining\x1b\[K", terminal.text
    )
    assert len(drawn) >= 4, terminal.text
    done = [int(one[3]) for one in drawn]
    assert done == sorted(set(done))
    for hashes, dots, share, number, rate, hours, minutes, seconds in drawn:
        assert len(hashes + dots) == 20
        assert len(hashes) == 20 * int(number) // 60
        assert float(share) == pytest.approx(100 * int(number) / 60, abs=0.06)
        assert 0 < float(rate) <= 20.5, "one takes a twentieth of a second at least"
        remaining = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
        assert remaining == pytest.approx((60 - int(number)) / float(rate), rel=0.1, abs=1.1)
    assert "\rputting the sequences together in out.hdf\x1b[K" in terminal.text
    (report, nothing) = screen(terminal.text)
    assert re.fullmatch(r"out.hdf: 60 sequences, 120 frames of 'data', 0.0 MB in [\d.]+ s", report)
    assert nothing == ""


def test_the_bar_is_no_longer_than_the_terminal_is_wide(folder: Path) -> None:
    terminal = Terminal(folder, dump('{"class": "corpus.py:Slow", "seconds": 1}'), columns=40)
    assert terminal.read_to_end() == 0
    bars = re.findall(r"\r(\[#.*?)\x1b\[K", terminal.text)
    assert bars
    assert all(len(bar) <= 39 for bar in bars)


def test_ctrl_c_leaves_nothing_behind(folder: Path) -> None:
    terminal = Terminal(folder, dump("corpus.py:endless"))
    terminal.read_until(r"\r\d+ sequences, \d+/s\x1b\[K")
    assert len(list(folder.glob(".out.hdf.*"))) == 1
    terminal.type(b"\x03")
    assert terminal.read_to_end() == 130
    assert "interrupted; out.hdf was not written" in screen(terminal.text)
    assert "Traceback" not in terminal.text
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["corpus.py"]


def test_nothing_is_drawn_into_a_file(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, *dump('{"class": "corpus.py:Slow", "seconds": 0.5}')], cwd=folder, capture_output=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert open_hdf([folder / "out.hdf"]).num_sequences == 60
