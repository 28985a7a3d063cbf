"""A test that leaves something fails by name, and the tests after it find all as before (leftovers.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

from launching import ROOT, trainings

CONFTEST = """
import leftovers, pytest
from pathlib import Path
leftovers.PATIENCE = 0.5

@pytest.fixture(scope="session")
def process(tmp_path_factory):
    tmp_path_factory.getbasetemp()
    with leftovers.TestProcess.of_this_session([Path(__file__).parent]) as process:
        yield process

@pytest.fixture(autouse=True)
def _leaves_nothing(process):
    with process.checked():
        yield
"""

TESTS = """
import os, subprocess, tempfile, threading, time
from pathlib import Path

HERE = Path(__file__).parent
WAITS = ["tail", "-f", __file__]

def test_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SET", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    ends.set()  # it may still be ending when this test has ended
    with subprocess.Popen(WAITS) as child, tempfile.NamedTemporaryFile():
        child.kill()

def test_a_process():
    subprocess.Popen(WAITS)

def test_a_process_whose_parent_has_ended():
    subprocess.run(["sh", "-c", '"$@" &', "sh", *WAITS], check=True)

def test_a_process_and_its_child():
    subprocess.Popen(["sh", "-c", '"$@"; true', "sh", *WAITS])

def test_a_thread():
    threading.Thread(target=time.sleep, args=(600,), name="that sleeps", daemon=True).start()

def test_a_variable():
    os.environ["LEFT"] = "1"

def test_another_value(monkeypatch):
    os.environ["HOME"] = "/elsewhere"

def test_a_variable_less():
    del os.environ["HOME"]

def test_a_temporary_file():
    os.close(tempfile.mkstemp(prefix="left-")[0])

def test_a_folder():
    (HERE / "made").mkdir()

def test_a_directory(tmp_path):
    os.chdir(tmp_path)

def test_that_all_is_as_before():
    assert ("LEFT" in os.environ, os.environ["HOME"], os.getcwd()) == (False, str(HERE), str(HERE))
    assert os.listdir(tempfile.gettempdir()) == []
"""

LEFT = {
    "a_process_and_its_child": r"the process \d+: sh -c .* tail -f \S+; the process \d+: tail -f \S+",
    "a_process": r"the process \d+: tail -f \S+",
    "a_process_whose_parent_has_ended": r"the process \d+: tail -f \S+",
    "a_thread": "the thread that sleeps",
    "a_variable": "the environment with another LEFT",
    "another_value": "the environment with another HOME",
    "a_variable_less": "the environment with another HOME",
    "a_temporary_file": r"the file \S+/left-\w+",
    "a_folder": r"the file \S+/made",
    "a_directory": r"the working directory \S+",
}


def test_a_test_that_leaves_something_fails_by_name(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_left.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT / "tests"), "HOME": str(tmp_path), "COLUMNS": "1000"}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", "--basetemp=base", "test_left.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert trainings(tmp_path) == []
    found = dict(re.findall(r"^ERROR test_left.py::test_(\w+) - AssertionError: the test left (.*)$", ended.stdout, re.MULTILINE))
    assert found.keys() == LEFT.keys(), ended.stdout
    for name, text in LEFT.items():
        assert re.fullmatch(text, found[name]), found[name]
    assert re.search(rf"{len(LEFT) + 2} passed, {len(LEFT)} errors", ended.stdout), ended.stdout
