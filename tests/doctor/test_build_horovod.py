"""What of building Horovod answers in a second: what a kept wheel is for, and what is said when it cannot be built. `make setup`
builds it, and every test under mpirun trains with it.
"""

import os
import shutil
import subprocess
import sys

from hvdtrain.doctor import build_horovod
from hvdtrain.doctor.build_horovod import built_for


def build(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvdtrain", "build-horovod", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def test_an_installed_horovod_that_works_is_left_alone(tmp_path):
    log = tmp_path / "log"
    finished = build("--log", str(log), "--wheel-dir", str(tmp_path / "wheels"))
    assert finished.returncode == 0
    assert "is installed and works with torch and tensorflow" in finished.stdout
    assert not log.exists()
    assert not (tmp_path / "wheels").exists()


def test_each_missing_program_is_named_with_its_package(tmp_path):
    (tmp_path / "g++").symlink_to(shutil.which("g++"))
    finished = build("--force", PATH=str(tmp_path))
    assert finished.returncode == 1
    assert finished.stderr.splitlines() == [
        "Horovod cannot be built yet:",
        "  cmake is not installed: apt-get install cmake",
        "  make is not installed: apt-get install make",
        "  mpicxx is not installed: apt-get install libopenmpi-dev openmpi-bin",
    ]


def test_a_folder_for_wheels_that_cannot_be_made_is_told_before_the_build(tmp_path):
    (tmp_path / "file").write_text("")
    finished = build("--force", "--wheel-dir", str(tmp_path / "file/wheels"), "--log", str(tmp_path / "log"))
    assert finished.returncode == 1
    assert "--wheel-dir: expected a folder that can be written, got" in finished.stderr
    assert not (tmp_path / "log").exists()


def test_a_wheel_is_for_the_frameworks_the_flags_and_the_processor_it_was_built_with(monkeypatch):
    both = built_for(["torch", "tensorflow"])
    assert both["torch"].startswith("torch 2.")
    assert both["tensorflow"].split()[0].startswith("tensorflow")
    assert "Open MPI" in both["mpi"]
    assert both["processor"].split()[0] == os.uname().machine
    assert built_for(["torch"]) == {name: value for name, value in both.items() if name != "tensorflow"}
    monkeypatch.setenv("CXXFLAGS", "-O1")
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    assert built_for(["torch", "tensorflow"]) == {**both, "CXXFLAGS": "-O1", "HOROVOD_WITHOUT_GLOO": "1"}


def test_a_wheel_is_kept_for_its_versions_alone(tmp_path):
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"first")
    of_torch = build_horovod._folder(tmp_path / "wheels", {"torch": "2.13"})
    other = build_horovod._folder(tmp_path / "wheels", {"torch": "2.14"})
    build_horovod._keep(wheel, of_torch, {"torch": "2.13"})
    wheel.write_bytes(b"second")
    build_horovod._keep(wheel, of_torch, {"torch": "2.13"})
    assert sorted(path.name for path in of_torch.iterdir()) == ["built-for.json", wheel.name]
    assert (of_torch / wheel.name).read_bytes() == b"second"
    assert other.parent == of_torch.parent
    assert not other.exists()


def test_the_first_error_is_shown_though_much_follows(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(["cc x.cc", "x.cc:1:1: error: no such thing", *map(str, range(100)), "pip: it failed"]))
    lines = build_horovod._what_failed(log).splitlines()
    assert lines[:2] == ["x.cc:1:1: error: no such thing", "..."]
    assert lines[-1] == "pip: it failed"
    assert len(lines) == 22
