"""The package that is published: the wheel, installed away from the checkout, does what the README says."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
from launching import ROOT, clean_environment

from hvdtrain.version import __version__

pytestmark = pytest.mark.slow

PACKAGE_FILES = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "hvdtrain").rglob("*")
    if path.is_file() and path.suffix not in (".pyc", ".pyo")
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    # Of a copy, as a build writes into the folder. What is left out is not part of the project: environments, data, trainings.
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "data", "exp", "build", "dist", "*.egg-info")
    ignored: Callable[[str, list[str]], set[str]] = lambda here, names: left_out(here, names) if Path(here) == ROOT else set()  # noqa: E731
    shutil.copytree(ROOT, folder / "copy", ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "copy"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and with the dependencies of this one, but not its hvdtrain."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    wheel = built / f"hvdtrain-{__version__}-py3-none-any.whl"
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel]
    finished = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def test_both_distributions_are_complete(built: Path) -> None:
    with ZipFile(built / f"hvdtrain-{__version__}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        about = f"hvdtrain-{__version__}.dist-info"
        metadata = wheel.read(f"{about}/METADATA").decode()
        assert wheel.read(f"{about}/entry_points.txt").decode().split() == [
            "[console_scripts]",
            "hvdtrain",
            "=",
            "hvdtrain.cli:main",
        ]
    assert {name for name in names if not name.startswith(f"{about}/")} == PACKAGE_FILES
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: MIT\n" in metadata
    assert '\nRequires-Dist: torch>=2.4; extra == "torch"\n' in metadata
    with tarfile.open(built / f"hvdtrain-{__version__}.tar.gz") as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        *PACKAGE_FILES,
        "pyproject.toml",
        "setup.py",
        "README.md",
        "Makefile",
        "configs/smallest.py",
        "tests/test_wheel.py",
    } <= sources


def test_the_example_of_the_readme_runs_elsewhere(python: Path, tmp_path: Path) -> None:
    """One epoch of it; and what needs files of the package that are no Python."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "smallest.py").write_text(re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1], encoding="utf-8")
    environment = clean_environment()
    environment.pop("PYTHONPATH", None)  # it may name the checkout

    def run(*arguments: str) -> str:
        finished = subprocess.run(
            [python, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    place = run("-c", "import hvdtrain; print(hvdtrain.__file__)").strip()
    assert Path(place).is_relative_to(python.parent.parent)
    printed = run("-m", "hvdtrain", "smallest.py", "++model", "exp/one/model", "++num_epochs", "1")
    assert f"hvdtrain {__version__}, torch: 1 rank" in printed
    score = float(re.search(r"^epoch 1/1 .*dev ce (\S+)", printed, re.MULTILINE)[1])
    assert score == pytest.approx(float(re.search(r"epoch 1/3 .*dev ce (\S+)", readme)[1]), rel=0.01)
    run(str(python.with_name("hvdtrain")), "init", "my_config.py")  # the script
    assert "num_epochs" in run("-m", "hvdtrain", "my_config.py", "--print-config")
    run("-m", "hvdtrain", "report", "exp/one", "--out", "page.html")
    assert "<style>" in (tmp_path / "page.html").read_text(encoding="utf-8")
