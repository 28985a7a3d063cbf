"""Two jobs never train the same model at the same time."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from fuzzing import cases, generator
from launching import ROOT, TOY, hvdtrain

from hvdtrain.checkpoint.lock import LockGuard, lock_model
from hvdtrain.errors import CheckpointError, ConfigError

HOLD = "import sys, time; from pathlib import Path; from hvdtrain.checkpoint.lock import lock_model; "


@pytest.fixture
def other(tmp_path: Path) -> "subprocess.Popen[str]":
    """Another process that holds the lock of exp/model."""
    program = HOLD + f"lock = lock_model(Path({str(tmp_path)!r}, 'exp', 'model')); lock.__enter__(); print(1); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    return process


def test_a_second_job_is_refused_and_told_who_the_first_is(corpus: Path, tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    model = tmp_path / "exp" / "model"
    found = json.loads((tmp_path / "exp" / "model.lock").read_text())
    began = time.monotonic()
    finished = hvdtrain(TOY, {"corpus": corpus, "model": model, "part": "two.hdf"})
    assert time.monotonic() - began < 15
    assert finished.status == 2
    who = f"process {other.pid} on {found['host']}, started {found['started']}"
    assert f"model: expected no other job that trains {model}, got {who} (wait until it ends" in finished.err
    assert sorted(path.name for path in model.parent.iterdir()) == ["model.lock"]
    with lock_model(tmp_path / "exp" / "another"):  # in the same folder
        pass
    other.send_signal(signal.SIGKILL)
    other.wait()
    finished = hvdtrain(TOY, {"corpus": corpus, "model": model, "part": "two.hdf"})
    assert finished.status == 0, finished.err
    assert not (tmp_path / "exp" / "model.lock").exists()


def test_it_waits_for_one_that_is_just_ending_and_children_do_not_hold_it(tmp_path: Path) -> None:
    lock = f"lock_model(Path({str(tmp_path)!r}, 'model'))"
    program = (
        HOLD + f"import os; lock = {lock}; lock.__enter__(); print(1); os.fork() or time.sleep(60); time.sleep(1); os._exit(0)"
    )
    command = [sys.executable, "-u", "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    began = time.monotonic()
    with lock_model(tmp_path / "model", patience=30):
        assert time.monotonic() - began < 20
    os.killpg(process.pid, signal.SIGKILL)  # its child
    process.wait()
    for _ in range(3):
        with lock_model(tmp_path / "model"):
            assert json.loads((tmp_path / "model.lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_of_the_file_system_signs_of_life_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)

    def lock() -> AbstractContextManager[None]:
        return lock_model(tmp_path / "model", beat=0.2)

    with lock(), pytest.raises(CheckpointError, match=f"got process {os.getpid()} on"), lock():
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "model.lock").write_text('{"host": "gone", "pid": 1, "started": "before"}')  # of a host that lost its power
    with lock():
        assert "gone" not in (tmp_path / "model.lock").read_text()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lock = lock_model(tmp_path / "file" / "exp" / "model")
    with pytest.raises(ConfigError, match=r"model: expected a folder that can be written to, got .*file/exp"), lock:
        pass


def test_a_lock_that_is_deleted_is_taken_again(tmp_path: Path) -> None:
    """Otherwise a second job would train the same model."""
    lock = tmp_path / "model.lock"
    attempt = HOLD + f"lock = lock_model(Path({str(tmp_path)!r}, 'model'), patience=0.1); lock.__enter__()"
    with lock_model(tmp_path / "model"):
        for delete in (lock.unlink, lambda: lock.rename(tmp_path / "moved"), lambda: os.replace(tmp_path / "moved", lock)):
            delete()
            time.sleep(2.5)  # to look at the file with open() would free this process's lock of it: so it is with POSIX
            ended = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, cwd=ROOT, timeout=60)
            assert f"got process {os.getpid()} on" in ended.stderr
    assert not lock.exists()


def test_another_jobs_lock_stays(tmp_path: Path, other: "subprocess.Popen[str]", caplog: pytest.LogCaptureFixture) -> None:
    """Where a second job was faster, the first one says so, continues, and leaves the second one's lock alone at its end."""
    path = tmp_path / "exp" / "model.lock"
    (tmp_path / "first").touch()
    guard = LockGuard(path, os.open(tmp_path / "first", os.O_RDWR), beat=0.1)
    time.sleep(1.0)
    guard.release()
    assert json.loads(path.read_text())["pid"] == other.pid
    assert caplog.text.count("another job now also trains the model: model: expected no other job that trains") == 1
    other.kill()
    other.wait()


def test_what_is_no_file_is_no_lock(tmp_path: Path) -> None:
    """A link's target is not overwritten, and nothing waits for the other end of a pipe."""
    (tmp_path / "target").write_text("precious")
    kinds = {"a link": lambda path: path.symlink_to(tmp_path / "target"), "a pipe": os.mkfifo, "a folder": Path.mkdir}
    for what, make in kinds.items():
        path = tmp_path / f"{what[2:]}.lock"
        make(path)
        lock = lock_model(tmp_path / what[2:])
        with pytest.raises(CheckpointError, match=rf"model: expected {path} to be a file, got {what}"), lock:
            pass
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.fuzz
def test_random_bytes_in_a_lock_that_is_left_over(tmp_path: Path) -> None:
    for case in range(cases(20)):
        numbers = generator("lock", case)
        text = numbers.choice([b"", b"[" * 5000, b"\xff\xfe", b'{"host": Infinity}', b'{"pid": []}', numbers.randbytes(100)])
        (tmp_path / "model.lock").write_bytes(text)
        with lock_model(tmp_path / "model"):
            assert json.loads((tmp_path / "model.lock").read_text())["pid"] == os.getpid()
        assert not (tmp_path / "model.lock").exists()
