"""What a wheel of Horovod says that it fits, where it is kept, and what is refused on a machine that it does not fit."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from hvdtrain.plugins.doctor import build_horovod
from hvdtrain.plugins.doctor.horovod_recipe import CudaChoice
from hvdtrain.plugins.doctor.horovod_wheel import built_for, label, matching_wheel, misfits

BUILT = {
    "horovod": "0.28.1",
    "python": "3.11.7",
    "abi": ".cpython-311-x86_64-linux-gnu.so",
    "compiler": "g++ (Debian 12.2.0) 12.2.0",
    "libc": "glibc 2.36",
    "mpi": "Open MPI 4.1.4",
    "processor": "x86_64 avx f16c fma",
    "cuda": "none",
    "torch": "torch 2.13.0+cpu",
    "tensorflow": "tensorflow_cpu 2.21.0",
}
NAME = "horovod-0.28.1+torch2.13.0.cpu.tensorflow.cpu2.21.0.openmpi4"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel as Horovod's setup.py makes it, with one file."""
    folder = tmp_path_factory.mktemp("built")
    root = folder / "root"
    info = root / "horovod-0.28.1.dist-info"
    (root / "horovod").mkdir(parents=True)
    info.mkdir()
    (root / "horovod/__init__.py").write_text("__version__ = '0.28.1'\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\nRequires-Dist: psutil\n\nVersion: x\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
    subprocess.run([sys.executable, "-m", "wheel", "pack", "-d", folder, root], check=True, capture_output=True)
    return folder / "horovod-0.28.1-py3-none-any.whl"


@pytest.fixture(scope="module")
def labelled(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with what it was built for."""
    return label(built, BUILT, tmp_path_factory.mktemp("labelled"))


def test_its_name_and_metadata_say_what_it_fits(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = label(built, BUILT, folder)
    assert [path.name for path in folder.iterdir()] == [wheel.name]
    assert wheel.name.startswith(f"{NAME}-0")
    with zipfile.ZipFile(wheel) as archive:
        assert json.loads(archive.read(f"{NAME}.dist-info/built-for.json")) == BUILT
        metadata = archive.read(f"{NAME}.dist-info/METADATA").decode()
    assert metadata.splitlines() == [
        "Metadata-Version: 2.1",
        "Name: horovod",
        f"Version: {NAME.removeprefix('horovod-')}",
        "Requires-Dist: psutil",
        "Requires-Dist: torch==2.13.0",
        "Requires-Dist: tensorflow-cpu==2.21.0",
        "",
        "Version: x",
    ]
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path / "installed"), str(wheel)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert (tmp_path / f"installed/{NAME}.dist-info").is_dir()


def test_a_wheel_is_kept_for_its_versions_alone(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    assert matching_wheel(folder, BUILT) is None
    wheel = label(built, BUILT, folder)
    other = label(built, {**BUILT, "compiler": "g++ 13"}, folder)
    assert label(built, BUILT, folder) == wheel
    assert matching_wheel(folder, BUILT) == wheel != other
    assert matching_wheel(folder, {**BUILT, "CXXFLAGS": "-O1"}) is None


@pytest.mark.parametrize(
    ("here", "reasons"),
    [
        ({}, []),
        ({"python": "3.11.9", "compiler": "", "mpi": "Open MPI 4.2.0", "libc": "glibc 2.41"}, []),
        ({"mpi": "none", "processor": "x86_64 avx avx512f f16c fma"}, []),
        ({"torch": "torch 2.15.0+cu132"}, ["built for torch 2.13.0+cpu, here is torch 2.15.0+cu132"]),
        ({"tensorflow": "tensorflow 2.21.0"}, ["built for tensorflow_cpu 2.21.0, here is tensorflow 2.21.0"]),
        ({"mpi": "Open MPI 5.0.7"}, ["built for Open MPI 4.1.4, here is Open MPI 5.0.7"]),
        ({"mpi": "MPICH 4.0.2"}, ["built for Open MPI 4.1.4, here is MPICH 4.0.2"]),
        ({"libc": "glibc 2.31"}, ["built for glibc 2.36 or newer, here is glibc 2.31"]),
        ({"cuda": "13.2"}, ["built for CUDA: none, here is 13.2"]),
        ({"processor": "x86_64 avx"}, ["built for a processor with f16c fma, which this one does not have"]),
        (
            {"python": "3.13.5", "abi": ".cpython-313-x86_64-linux-gnu.so", "mpi": "Open MPI 5.0.7"},
            ["built for Python 3.11.7, here is 3.13.5", "built for Open MPI 4.1.4, here is Open MPI 5.0.7"],
        ),
    ],
)
def test_a_wheel_that_does_not_fit_is_refused_with_all_reasons(here: dict[str, str], reasons: list[str], labelled: Path) -> None:
    assert misfits(labelled, {**BUILT, **here}) == reasons


def test_a_wheel_for_one_framework_fits_where_only_that_one_is_installed(built: Path, labelled: Path, tmp_path: Path) -> None:
    torch = {name: value for name, value in BUILT.items() if name != "tensorflow"}
    assert misfits(labelled, torch) == []
    assert misfits(label(built, torch, tmp_path), BUILT) == ["built for tensorflow: none, here is tensorflow_cpu 2.21.0"]


def test_a_wheel_that_was_not_made_here_is_refused(built: Path) -> None:
    assert misfits(built, BUILT) == ["expected a wheel that build-horovod made, with built-for.json in it"]


@pytest.mark.slow
def test_install_refuses_wheels_that_do_not_fit_and_leaves_horovod_alone(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = label(built, {**BUILT, "torch": "torch 1.0.0"}, folder)
    before = version("horovod")
    for place in (folder, wheel, tmp_path / "nowhere"):
        assert build_horovod.main(["--install", str(place), "--log", str(tmp_path / "log")]) == 1
        printed = capsys.readouterr().err
        if place == tmp_path / "nowhere":
            assert "--install: expected a wheel that build-horovod made" in printed
        else:
            assert wheel.name in printed
            assert "built for torch 1.0.0, here is torch 2." in printed
    assert version("horovod") == before
    assert not (tmp_path / "log").exists()


def test_a_wheel_is_for_the_frameworks_the_flags_and_the_processor_it_was_built_with() -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": "/root"}
    both = built_for(["torch", "tensorflow"], CudaChoice(), environment)
    assert both["torch"].startswith("torch 2.")
    assert both["tensorflow"].split()[0].startswith("tensorflow")
    assert both["mpi"].startswith("Open MPI ")
    assert both["processor"].split()[0] == os.uname().machine
    assert both["cuda"] == "none"
    without = {name: value for name, value in both.items() if name != "tensorflow"}
    more = {"CXXFLAGS": "-O1", "HOROVOD_WITHOUT_GLOO": "1"}
    assert built_for(["torch"], CudaChoice("13.2"), {**environment, **more}) == {**without, **more, "cuda": "13.2"}
