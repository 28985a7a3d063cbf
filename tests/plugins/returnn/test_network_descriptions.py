"""What RETURNN's descriptions of networks mean for an epoch: the tests of tests/toy/network_descriptions.py, in another process.

Importing RETURNN's code for TensorFlow changes TensorFlow for the whole process (no eager execution, other shapes), in which the
tests of Keras models would fail.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, clean_environment


@pytest.mark.slow
def test_the_networks_and_keys_of_epochs(tmp_path: Path) -> None:
    options = ["-q", "-o", "addopts=--import-mode=importlib", f"--basetemp={tmp_path / 'temporary'}"]
    command = [sys.executable, "-m", "pytest", *options, "tests/toy/network_descriptions.py"]
    finished = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert " passed" in finished.stdout
