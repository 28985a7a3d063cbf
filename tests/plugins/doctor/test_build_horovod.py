"""What of building Horovod answers in a second: what is left alone, and what is said when it cannot be built. `make setup`
builds it, and every test under mpirun trains with it.
"""

import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest.mock import patch

import pytest
from launching import Finished

from hvdtrain.plugins.doctor import build_horovod
from hvdtrain.plugins.doctor.build_horovod import error_lines, newer_than_tried


def build(*arguments: str, **environment: str) -> Finished:
    """Run the command in this process."""
    with patch.dict(os.environ, environment), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = build_horovod.main([*arguments])
    return Finished(status, out.getvalue(), err.getvalue(), 0.0)


@pytest.mark.slow
def test_an_installed_horovod_that_works_is_left_alone(tmp_path):
    log = tmp_path / "log"
    finished = build("--log", str(log), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert finished.status == 0
    assert "is installed and works with torch and tensorflow" in finished.out
    assert not log.exists()
    assert not (tmp_path / "cache/hvdtrain").exists()


def test_each_missing_program_is_named_with_its_package(tmp_path):
    (tmp_path / "g++").symlink_to(shutil.which("g++"))
    finished = build("--force", PATH=str(tmp_path))
    assert finished.status == 1
    assert finished.err.splitlines() == [
        "Horovod cannot be built yet:",
        "  cmake is not installed: apt-get install cmake",
        "  make is not installed: apt-get install make",
        "  mpicxx is not installed: apt-get install libopenmpi-dev openmpi-bin",
    ]


def test_missing_headers_of_python_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(build_horovod.sysconfig, "get_path", lambda name: str(tmp_path / name))
    [line] = build_horovod._missing(["torch"])
    assert line == f"  Python.h is not in {tmp_path}/include: apt-get install python3-dev (or the headers of this Python)"


def test_a_folder_for_wheels_that_cannot_be_made_is_told_before_the_build(tmp_path):
    (tmp_path / "file").write_text("")
    finished = build("--force", "--wheel-dir", str(tmp_path / "file/wheels"), "--log", str(tmp_path / "log"))
    assert finished.status == 1
    assert "--wheel-dir: expected a folder that can be written, got" in finished.err
    assert not (tmp_path / "log").exists()


# A log as make and pip leave it: two compilers at work, the linker, then pip's summary.
LOG = """\
cc x.cc
/b/x.cc:1:1: error: 'logic_error' is not a member of 'std'
    1 | throw std::logic_error("");
/b/y.cc:7:2: error: #error C++20 or later compatible compiler is required to use ATen.
/b/x.cc:1:1: error: 'logic_error' is not a member of 'std'
  CMake Error at /usr/share/cmake/FindPackageHandleStandardArgs.cmake:230 (message):
    Could NOT find CUDAToolkit (missing: CUDA_CUDART)

  Call Stack (most recent call first):
  CMakeLists.txt:1 (find_package)

  except ImportError as error:
-- Configuring incomplete, errors occurred!
/usr/bin/ld: cannot find -ltorch
"""


def test_the_errors_of_compiler_cmake_and_linker_are_shown_though_much_follows():
    lines = error_lines(
        LOG + "\n".join([*map(str, range(100)), "  error: subprocess-exited-with-error", "ERROR: Failed building"])
    )
    assert lines == [
        "/b/x.cc:1:1: error: 'logic_error' is not a member of 'std'",
        "/b/y.cc:7:2: error: #error C++20 or later compatible compiler is required to use ATen.",
        "CMake Error at /usr/share/cmake/FindPackageHandleStandardArgs.cmake:230 (message):",
        "  Could NOT find CUDAToolkit (missing: CUDA_CUDART)",
        "/usr/bin/ld: cannot find -ltorch",
    ]
    many = error_lines("\n".join(f"x.cc:{number}: error: wrong" for number in range(105)))
    assert len(many) == 13
    assert many[-1] == "... and 93 more"
    assert error_lines("\n".join(map(str, range(100)))) == [str(number) for number in range(80, 100)]
    assert error_lines("ERROR: No matching distribution found for horovod==0.28.1\nthe end") == [
        "ERROR: No matching distribution found for horovod==0.28.1"
    ]


def test_what_is_newer_than_anything_tried_is_told():
    tried = {"torch": "torch 2.15.0+cu132", "tensorflow": "tensorflow_cpu 2.21.0", "python": "3.13.9", "mpi": "Open MPI 5.0.7"}
    assert newer_than_tried({**tried, "compiler": "g++ (Debian 14.2.0-19) 14.2.0"}) == []
    assert newer_than_tried({"torch": "torch 2.16.0", "python": "3.15.0", "mpi": "MPICH 9.0"}) == [
        "torch 2.16.0 is newer than 2.15.0, the newest that this was tried with: trying",
        "Python 3.15.0 is newer than 3.14, the newest that this was tried with: trying",
    ]


@pytest.mark.slow
def test_a_log_of_a_real_failure_ends_with_the_compilers_own_lines(tmp_path):
    """Horovod's build fails while CMake configures: that takes seconds."""
    finished = build("--force", "--log", str(tmp_path / "log"), XDG_CACHE_HOME=str(tmp_path), HOROVOD_CMAKE="/bin/false")
    assert finished.status == 1
    assert "building Horovod failed; the whole log: " in finished.err
    assert "returned non-zero exit status 1" in finished.err
