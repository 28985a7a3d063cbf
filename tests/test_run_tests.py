"""tools/run_tests.sh: in CI, a few tests that fail are run once more, and named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

TESTS = """
from pathlib import Path
import pytest

def test_always():
    Path("always").open("a").write("x")

@pytest.mark.parametrize("name", {now_and_then})
def test_now_and_then(name):
    path = Path(name)
    is_first = not path.exists()
    path.touch()
    assert not is_first

def test_fault():
    assert {works}
"""


@pytest.mark.parametrize(
    ("now_and_then", "works", "allowed", "status", "tried_again"),
    [
        ([], True, "2", 0, False),
        (["a"], True, "2", 0, True),
        (["a", "b"], True, "2", 0, True),
        (["a", "b", "c"], True, "2", 1, False),
        (["a"], False, "2", 1, True),
        (["a"], True, None, 1, False),
    ],
)
def test_few_failed_tests_are_run_once_more(
    tmp_path: Path, now_and_then: list[str], works: bool, allowed: str | None, status: int, tried_again: bool
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.format(now_and_then=now_and_then, works=works))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "ONCE_MORE", "HVDTRAIN_"))}
    ended = subprocess.run(
        [ROOT / "tools" / "run_tests.sh", sys.executable, "-m", "pytest", "test_it.py"],
        cwd=tmp_path,
        env=environ | ({} if allowed is None else {"ONCE_MORE": allowed}),
        capture_output=True,
        encoding="utf-8",
    )
    assert ended.returncode == status, ended.stdout
    assert ("running them once more" in ended.stdout) == tried_again
    said = ended.stdout.partition("passed alone:\n")[2]
    assert sorted(said.split()) == ([f"test_it.py::test_now_and_then[{name}]" for name in now_and_then] if status == 0 else [])
    assert (tmp_path / "always").read_text() == "x"
