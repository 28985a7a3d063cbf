"""The tools that say where the time of a start goes."""

import re

import pytest
from launching import launch


def test_the_time_of_help_is_compared_with_that_of_numpy() -> None:
    finished = launch(["tools/help_time.py", "--pairs", "1"])
    assert finished.status == 0, finished.err
    assert float(re.search(r"^processor time: (\S+) times import numpy$", finished.out, re.MULTILINE)[1]) > 0


@pytest.mark.slow
def test_the_time_of_imports_by_package() -> None:
    finished = launch(["tools/import_times.py", "-c", "import numpy, hvdtrain.settings"])
    assert finished.status == 0, finished.err
    lines = [line.split(maxsplit=2) for line in finished.out.splitlines()]
    seconds = {name: float(number) for number, _, name in lines}
    assert seconds.keys() == {"NumPy", "hvdtrain", "Python and others", "in all"}
    assert min(seconds["NumPy"], seconds["hvdtrain"]) > 0
    wrong = launch(["tools/import_times.py", "-c", "import no_such_package"])
    assert wrong.status == 1
    assert "No module named 'no_such_package'" in wrong.err
