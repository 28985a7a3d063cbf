"""Whether a training runs, and how it ended, as its folder shows it. Real ends are asserted on in tests/launchers."""

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from report_pages import run_folder

from hvdtrain.errors import PeerFailure, TrainingError, failure_text
from hvdtrain.plugins.report.__main__ import main
from hvdtrain.plugins.report.serve import LivePage
from hvdtrain.plugins.report.state import SILENT, read_state
from hvdtrain.plugins.watchdog.open import append_hang
from hvdtrain.report import ends
from hvdtrain.report.ends import LAUNCHER, append_end, read_ends, record_end
from hvdtrain.runtime.interrupt import Stopped


def state(folder: Path, seconds: float = 0.0, *, is_complete: bool = False) -> tuple[str, str]:
    """Of a training whose model is called model, some seconds from now."""
    found = read_state(folder, f"{folder}/model", is_complete=is_complete, now=time.time() + seconds)
    return found.name, found.why


def begin(folder: Path, number: int, seconds_ago: float = 0.0) -> None:
    """As a start that holds the lock."""
    folder.mkdir(exist_ok=True)
    (folder / "starts.jsonl").write_text('{"settings": {}}\n' * number)
    then = time.time() - seconds_ago
    for name in ("model.lock", "starts.jsonl"):
        (folder / name).touch()
        os.utime(folder / name, (then, then))


@pytest.mark.parametrize(
    ("error", "rank", "status", "why"),
    [
        (None, 0, "finished", ""),
        (None, 1, None, ""),
        (Stopped("stopped by SIGTERM"), 0, "stopped", "stopped by SIGTERM"),
        (Stopped("stopped by SIGTERM"), 1, None, ""),
        (KeyboardInterrupt(), 0, "stopped", "interrupted"),
        (TrainingError("ce = nan").on_all_ranks(), 0, "failed", "ce = nan"),
        (TrainingError("ce = nan").on_all_ranks(), 1, None, ""),
        (ValueError("planted"), 1, "failed", "ValueError: planted"),
        (PeerFailure("stopped"), 1, None, ""),
    ],
)
def test_rank_0_records_the_end_and_another_rank_its_own_error(
    tmp_path: Path, error: BaseException | None, rank: int, status: str | None, why: str
) -> None:
    with nullcontext() if error is None else pytest.raises(type(error)), record_end(tmp_path, rank):
        if error is not None:
            raise error
    assert [(end.status, end.why, end.by) for end in read_ends(tmp_path)] == ([(status, why, f"rank {rank}")] if status else [])


def test_running_then_lost_and_ended(tmp_path: Path) -> None:
    begin(tmp_path, 1)
    assert state(tmp_path) == ("running", "")
    assert state(tmp_path, SILENT + 9) == ("lost", "")  # SIGKILL
    os.utime(tmp_path / "model.lock", (time.time() + SILENT, time.time() + SILENT))
    silent = read_state(tmp_path, "model", is_complete=False, now=time.time() + SILENT + 9)
    assert (silent.name, silent.silence > SILENT) == ("running", True), "the lock has a heartbeat, but no step was recorded"
    begin(tmp_path, 1)
    append_end(tmp_path, "failed", "hangs", "the watchdog of rank 0")
    assert state(tmp_path) == ("failed", "hangs"), "the lock is there, but its process has ended"
    os.utime(tmp_path / ends.ENDS, (time.time() - 60, time.time() - 60))
    assert state(tmp_path) == ("running", ""), "begun again, and not recorded in starts.jsonl yet"
    begin(tmp_path, 2)
    assert state(tmp_path) == ("running", "")
    (tmp_path / "model.lock").unlink()
    assert state(tmp_path) == ("ended", ""), "of an earlier release"
    assert state(tmp_path, is_complete=True) == ("finished", "")


def test_the_record_that_knows_the_cause(tmp_path: Path) -> None:
    begin(tmp_path, 3, seconds_ago=60)
    append_end(tmp_path, "failed", "another rank failed", "rank 0", is_consequence=True)
    assert state(tmp_path) == ("failed", "another rank failed")
    append_end(tmp_path, "failed", "rank 1 of 2 ended by signal 9", LAUNCHER)
    append_end(tmp_path, "failed", "another rank failed", "rank 0", is_consequence=True)
    assert state(tmp_path) == ("failed", "rank 1 of 2 ended by signal 9")
    append_hang(tmp_path, 0, "rank 1 is stopped", False)
    append_end(tmp_path, "failed", "rank 1 of 2 ended by signal 9", LAUNCHER)
    assert state(tmp_path) == ("failed", "rank 1 is stopped")


def test_a_record_is_no_cause_of_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    append_end(tmp_path / "file", "failed", "why", "rank 0")
    with record_end(tmp_path / "nowhere", 0):
        pass
    os.mkfifo(tmp_path / ends.ENDS)  # which nothing reads, as a file system that hangs
    monkeypatch.setattr("hvdtrain.plugins.watchdog.open.SECONDS_TO_WRITE", 0.2)
    began = time.monotonic()
    append_hang(tmp_path, 0, "why", False)
    assert time.monotonic() - began < 5
    os.close(os.open(tmp_path / ends.ENDS, os.O_RDONLY | os.O_NONBLOCK))  # the thread that waits to write there ends
    (tmp_path / ends.ENDS).unlink()
    unknown, wrong = (
        '{"start": 1, "status": "great", "why": "", "by": ""}',
        '{"start": 1, "status": "failed", "why": 1, "by": ""}',
    )
    damaged = ['{"start": 1', "[]", unknown, wrong]
    (tmp_path / ends.ENDS).write_text("\n".join(damaged))
    assert read_ends(tmp_path) == []


def test_the_page_says_how_a_training_ended(tmp_path: Path) -> None:
    folder, page = run_folder(tmp_path / "run", steps=3), tmp_path / "page.html"
    append_end(folder, "failed", "ce = nan in step 5\nin <layer>", "rank 1")
    live = LivePage([folder])
    first = json.loads(live.newer_than("") or b"")
    assert not first["running"]
    assert main([str(folder), "--out", str(page)]) == 0
    text = page.read_text()
    assert "<span class='badge failed'>failed</span>" in text
    assert re_band(text) == "<b>failed</b> ce = nan in step 5"
    assert "in &lt;layer&gt;" in text
    assert "'tile best'" not in text, "nothing of it is green"
    begin(folder, 1)
    second = json.loads(live.newer_than(first["version"]) or b"")
    assert second["running"]
    assert "badge running" in second["sections"]["summary"]
    assert live.newer_than(second["version"]) is None
    begin(folder, 1, seconds_ago=4000)
    for name in ("scores.jsonl", "steps.jsonl"):
        os.utime(folder / name, (time.time() - 3600, time.time() - 3600))
    assert main([str(folder), "--out", str(page)]) == 0
    assert "no sign of life for 60 min" in page.read_text()


def re_band(text: str) -> str:
    """The beginning of the band of a training that failed."""
    return text.partition("<div class='band failed'>")[2].partition("<span")[0]


def test_a_training_that_failed_in_its_first_epoch_has_a_page(tmp_path: Path) -> None:
    begin(tmp_path, 1, seconds_ago=60)
    append_end(tmp_path, "failed", "ce = nan", "rank 0")
    assert main([str(tmp_path)]) == 0
    assert "<b>failed</b> ce = nan" in (tmp_path / "report.html").read_text()


def test_a_rank_with_the_error_of_one_before_it_says_so(tmp_path: Path) -> None:
    """Other errors, and that of an earlier start, are its own."""
    begin(tmp_path, 1)
    append_end(tmp_path, "failed", "ValueError: early", "rank 0")
    begin(tmp_path, 2)
    append_end(tmp_path, "failed", "ValueError: planted", "rank 0")
    texts = []
    for what in ("planted", "early", "other"):
        try:
            with record_end(tmp_path, 1):
                raise ValueError(what)
        except ValueError as error:
            error.add_note("in this batch")
            texts.append(failure_text(error))
    assert texts[0] == "ValueError: planted (as on rank 0, which prints more)\n"
    for text, what in zip(texts[1:], ("early", "other"), strict=True):
        lines = text.splitlines()
        assert lines[:3] == [f"ValueError: {what}", "in this batch", "Traceback (most recent call last):"]
        assert lines[-1] == f"ValueError: {what}"
