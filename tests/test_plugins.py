"""The package without its own plug-ins: it trains, and what asks for one of them is refused by name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

CONFIG = ROOT / "configs/smallest.py"

OWN = sorted(path.parent.name for path in (ROOT / "hvdtrain/plugins").glob("*/__init__.py"))


def run(package: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "hvdtrain", *map(str, arguments)]
    return subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which each plug-in's folder is deleted."""
    package = tmp_path_factory.mktemp("core") / "hvdtrain"
    shutil.copytree(ROOT / "hvdtrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in OWN:
        shutil.rmtree(package / "plugins" / name)
    return package


@pytest.mark.slow
def test_the_core_trains_alone(core: Path, tmp_path: Path) -> None:
    trained = run(core, CONFIG, "++model", tmp_path / "model", "++num_epochs", 1)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "scores.jsonl").exists()


def test_what_is_missing_is_refused_by_name(core: Path) -> None:
    assert run(core, "--help").returncode == 0
    refused = run(core, "submit", CONFIG)
    assert refused.returncode == 2
    assert "submit: expected a config file, got: No such file or directory" in refused.stderr
    assert "--help lists the commands" in refused.stderr
