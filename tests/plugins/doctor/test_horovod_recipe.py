"""Which C++ standard Horovod is compiled in, whether with CUDA, and what is refused before anything is compiled."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.plugins.doctor import horovod_recipe
from hvdtrain.plugins.doctor.horovod_recipe import (
    CannotBuild,
    CudaChoice,
    choose_cuda,
    cxx_standard,
    header_error,
    missing_of_cuda,
)

GUARDED = """\
#if __cplusplus < {number}L
#error {text}
#endif
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package "torch" whose headers ask for a standard, as ATen.h does since torch 2.14, and that is found first."""

    def make(number: int, text: str, cuda: str | None = None) -> None:
        folder = tmp_path / "packages/torch"
        (folder / "include/torch").mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("")
        (folder / "version.py").write_text(f"__version__ = '9.9.0'\ncuda = {cuda!r}\n")
        (folder / "include/torch/extension.h").write_text("#include <torch/inner.h>\n#include <not_there.h>\n")
        (folder / "include/torch/inner.h").write_text(GUARDED.format(number=number, text=text))
        spec = type("Spec", (), {"submodule_search_locations": [str(folder)]})()
        monkeypatch.setattr(horovod_recipe, "find_spec", lambda name: spec if name == "torch" else None)

    return make


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Put a g++ in PATH that is the real one, except that it does not know some options."""

    def make(refused: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        real = shutil.which("g++")
        refuse = f'case "$each" in {refused}) echo "g++: error: unrecognized option $each" >&2; exit 1 ;; esac'
        (folder / "g++").write_text(f'#!/bin/sh\nfor each; do {refuse}; done\nexec {real} "$@"\n')
        (folder / "g++").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return make


def test_the_standard_is_the_oldest_that_the_headers_accept(package):
    package(201703, "C++17 or later compatible compiler is required to use PyTorch.")
    oldest = 17 if horovod_recipe._compile(horovod_recipe.FLATBUFFERS_SPAN, 17, "-fsyntax-only") is None else 20
    assert cxx_standard(["torch"])[0] == oldest
    package(202002, "C++20 or later compatible compiler is required to use PyTorch.")
    standard, why = cxx_standard(["torch"])
    assert standard == 20
    if oldest == 17:
        said = "torch's headers say: C++20 or later compatible compiler is required to use PyTorch."
        assert why == f"C++20, since in C++17 {said}"
    package(202100, "C++23 please")
    assert header_error("torch", 20) == "torch's headers say: C++23 please"
    assert cxx_standard(["torch"])[0] == 23


@pytest.mark.slow
def test_the_installed_frameworks_are_accepted():
    assert cxx_standard(["torch", "tensorflow"])[0] in (17, 20)
    assert header_error("tensorflow", 14) == 'tensorflow\'s headers say: "C++ versions less than C++17 are not supported."'


def test_flatbuffers_of_before_cpp20_is_not_compiled_by_a_compiler_that_refuses_it(monkeypatch, package):
    package(201703, "C++17 please")
    monkeypatch.setattr(horovod_recipe, "FLATBUFFERS_SPAN", "#error as GCC 14 does\n")
    assert cxx_standard(["torch"]) == (20, "C++20, since in C++17 g++ refuses Horovod's flatbuffers")


def test_headers_that_ask_for_more_than_the_compiler_has_are_refused(monkeypatch, package, compiler):
    monkeypatch.setattr(horovod_recipe, "FLATBUFFERS_SPAN", "int flatbuffers;\n")  # GCC 14 refuses the real one in C++17
    package(202002, "C++20 or later compatible compiler is required to use ATen.")
    compiler("-std=c++2*")
    with pytest.raises(CannotBuild) as refused:
        cxx_standard(["torch"])
    assert "expected a compiler that accepts the frameworks' headers, got g++" in str(refused.value)
    assert "C++20 or later compatible compiler is required to use ATen." in str(refused.value)
    assert "g++ has no C++20 (a newer g++ in PATH, or an older framework)" in str(refused.value)


def toolkit(folder: Path) -> Path:
    """A CUDA toolkit of which only a compiler is there, one that cannot compile."""
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin/nvcc"
    nvcc.write_text('#!/bin/sh\necho "nvcc fatal: cannot find cicc" >&2\nexit 1\n')
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return folder


def test_an_incomplete_toolkit_is_named_and_left_out(tmp_path, monkeypatch, package):
    package(201703, "C++17 please", cuda="13.2")
    home = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("PATH", f"{home}/bin:/usr/bin:/bin")
    environment = {"CUDA_HOME": str(home), "PATH": os.environ["PATH"]}
    missing = missing_of_cuda(home)
    assert missing == "nvcc cannot compile a program"
    note = f"building for CPUs: an incomplete CUDA toolkit in {home}: {missing}"
    assert choose_cuda(["torch"], environment) == CudaChoice(note=note)
    with pytest.raises(CannotBuild, match=r"HOROVOD_GPU_OPERATIONS=NCCL: expected .* complete toolkit, got an incomplete"):
        choose_cuda(["torch"], {**environment, "HOROVOD_GPU_OPERATIONS": "NCCL"})


def test_a_torch_without_cuda_is_built_for_cpus_whatever_toolkit_there_is(tmp_path, monkeypatch, package):
    package(201703, "C++17 please", cuda=None)
    home = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    assert choose_cuda(["torch"], {"CUDA_HOME": str(home)}) == CudaChoice()
    with pytest.raises(CannotBuild, match="got a framework that was built without CUDA"):
        choose_cuda(["torch"], {"HOROVOD_GPU_OPERATIONS": "NCCL"})


PYTORCH = """\
cmake_minimum_required(VERSION 3.13)
project(horovod CXX)
set(CMAKE_MODULE_PATH ${CMAKE_MODULE_PATH} ${PROJECT_SOURCE_DIR}/cmake/Modules)
find_package(Pytorch)
message("CUDA: ${Pytorch_CUDA}; ${Pytorch_LIBRARIES}")
find_package(CUDAToolkit)
message("toolkit: ${CUDAToolkit_FOUND}; compiler: ${CMAKE_CUDA_COMPILER}")
"""


def test_horovods_cmake_is_told_to_leave_cuda_out(tmp_path):
    """The module that finds PyTorch for Horovod says that there is CUDA; the build for CPUs does not hear of it."""
    (tmp_path / "cmake/Modules").mkdir(parents=True)
    (tmp_path / "cmake/Modules/FindPytorch.cmake").write_text(
        "set(Pytorch_FOUND TRUE)\nset(Pytorch_CUDA TRUE)\n"
        "set(Pytorch_LIBRARIES /a/libtorch.so;/a/libc10_cuda.so;cudart-NOTFOUND)\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(PYTORCH)
    for with_cuda, expected in ((False, "CUDA: FALSE; /a/libtorch.so\n"), (True, "CUDA: TRUE; ")):
        folder = tmp_path / f"with-{with_cuda}"
        folder.mkdir()
        environment = horovod_recipe.write_wrappers(folder, "cmake", 17, with_cuda)
        command = [environment["HOROVOD_CMAKE"], "-S", str(tmp_path), "-B", str(folder / "build")]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        assert expected in done.stderr
        if not with_cuda:
            assert "toolkit: ; compiler: NOTFOUND" in done.stderr


def test_the_wrapper_compiles_what_no_longer_includes_its_headers_by_itself(tmp_path):
    environment = horovod_recipe.write_wrappers(tmp_path, "cmake", 20, with_cuda=False)
    (tmp_path / "x.cc").write_text(
        '#if __cplusplus < 202002L\n#error old\n#endif\nuint32_t f() { throw std::logic_error(""); }\n'
    )
    command = [environment["CXX"], "-std=gnu++14", "-g", "-c", "x.cc", "-o", "x.o"]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert sys.platform != "linux" or b".debug_info" not in (tmp_path / "x.o").read_bytes()
