"""How Horovod 0.28.1, the last release, compiles with the compilers and frameworks that are installed.

It is older than all of them. Four things make its unedited source build:

- pip must not isolate the build: Horovod compiles against the torch and tensorflow that are installed.
- Every file is compiled in a C++ standard that the frameworks' headers accept and in which this compiler accepts Horovod's
  own files; the sources ask for C++14. A wrapper around the C++ compiler replaces the option (`COMPILER_WRAPPER`).
- Its sources use std::logic_error and uint32_t without including <stdexcept> and <cstdint>, which the headers of GCC 13 and
  later no longer include by themselves: the wrapper includes them in every file.
- Horovod's XLA kernels stay out, since the TensorFlow wheel does not carry all headers they include.

Two more reduce the processor time to less than a third: no debug information, and horovod.cmake, which makes CMake compile
the files that both frameworks' libraries share only once.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
HOROVOD_CMAKE = Path(__file__).with_name("horovod.cmake")

# The last -std and the last -g win. xla_mpi_ops.cc compiles to nothing where TensorFlow is older than 2.6.
COMPILER_WRAPPER = """\
#!/bin/sh
case "$*" in
    *xla_mpi_ops.cc*) exec g++ "$@" {options} -UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=2005000000 ;;
    *) exec g++ "$@" {options} ;;
esac
"""

# Horovod's setup.py starts $HOROVOD_CMAKE twice: to configure, which reads horovod.cmake, too, and to build. Gloo asks for
# the behaviour of CMake 2.8, which CMake 4 has dropped.
CMAKE_WRAPPER = """\
#!/bin/sh
case "$1" in
    --build) exec {cmake} "$@" ;;
    *) exec {cmake} "$@" -DCMAKE_PROJECT_horovod_INCLUDE={include} -DCMAKE_POLICY_VERSION_MINIMUM=3.5 {options} ;;
esac
"""

# Without these, Horovod's CMake would turn CUDA on for a torch with CUDA wherever it finds a CUDA toolkit, complete or not.
WITHOUT_CUDA = "-DHVDTRAIN_WITHOUT_CUDA=ON -DCMAKE_CUDA_COMPILER=NOTFOUND -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"

# The oldest standard comes first: what has been built for years is not changed without need.
STANDARDS = (17, 20, 23, 26)

# The header of each framework that Horovod's binding begins with. All others that matter follow from it.
HEADERS = {"torch": "torch/extension.h", "tensorflow": "tensorflow/core/framework/op_kernel.h"}

# What Horovod's bundled flatbuffers does before C++20: GCC 14 and later refuse it, even if it is never used. In C++20,
# flatbuffers uses std::span instead of its copy of it.
FLATBUFFERS_SPAN = """\
template <class T> struct span {
    span &operator=(const span &other) { count = other.count; return *this; }
    const unsigned count;
};
"""

# The headers of the toolkit that Horovod, and those of torch that it includes, ask for.
CUDA_HEADERS = ("cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "cuda_fp16.h")

# As Horovod's CMakeLists.txt looks for CUDA, and its FindPytorch.cmake for the libraries of torch's extensions with CUDA.
CUDA_PROBE = """\
cmake_minimum_required(VERSION 3.13)
project(probe CXX)
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "nvcc cannot compile a program")
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
foreach(header @HEADERS@)
    unset(found CACHE)
    find_path(found ${header} PATHS ${CUDAToolkit_INCLUDE_DIRS} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    if(NOT found)
        message(FATAL_ERROR "${header} is missing")
    endif()
endforeach()
find_library(cudart cudart HINTS @HOME@/lib64 @HOME@/lib)
if(NOT cudart)
    message(FATAL_ERROR "libcudart.so is missing (CUDA_HOME names another toolkit)")
endif()
"""


class CannotBuild(Exception):
    """Why Horovod cannot be built here, known before anything is compiled. Lines with what to do."""


def cxx_standard(frameworks: list[str]) -> tuple[int, str]:
    """The C++ standard to compile with, and why, in words.

    It is the oldest in which none of the frameworks' headers ends in an #error, and which compiles what Horovod does. The
    headers are read by the compiler itself, since what they include decides as much as their first lines.

    Raises:
        CannotBuild: no standard of this compiler will do.
    """
    reasons = []
    for standard in STANDARDS:
        if _compile("", standard, "-fsyntax-only"):
            reasons.append(f"g++ has no C++{standard}")
            break
        if standard < 20 and _compile(FLATBUFFERS_SPAN, standard, "-fsyntax-only"):
            refused: str | None = "g++ refuses Horovod's flatbuffers"
        else:
            refused = next(filter(None, (header_error(framework, standard) for framework in frameworks)), None)
        if not refused:
            return standard, f"C++{standard}" + (f", since in C++{STANDARDS[0]} {reasons[0]}" if reasons else "")
        reasons.append(refused)
    version = _output("g++", "--version").partition("\n")[0]
    # The last reason is that of the newest standard tried, or that the compiler has no newer one.
    raise CannotBuild(
        f"  expected a compiler that accepts the frameworks' headers, got {version}: {'; '.join(dict.fromkeys(reasons))} "
        "(a newer g++ in PATH, or an older framework)"
    )


def header_error(framework: str, standard: int) -> str | None:
    """What the framework's headers say to this standard, or None if they accept it.

    Only #error counts: other errors, such as a header that is not found, may not concern Horovod.
    """
    folders = include_folders(framework)
    options = ["-E", "-Wfatal-errors", *(f"-I{folder}" for folder in folders), f"-I{sysconfig.get_path('include')}"]
    said = _compile(f"#include <{HEADERS[framework]}>\n", standard, *options)
    match = re.search(r"error: #error (.*)", said or "")
    return f"{framework}'s headers say: {match[1].strip()}" if match else None


def include_folders(framework: str) -> list[Path]:
    """The folders of a framework's headers."""
    spec = find_spec(framework)
    root = Path((spec.submodule_search_locations or [""])[0] if spec else "") / "include"
    return [root, root / "torch/csrc/api/include"] if framework == "torch" else [root]


@dataclass(frozen=True)
class CudaChoice:
    """Whether Horovod is built with CUDA.

    Attributes:
        version: of the CUDA that torch was built for, where Horovod is built with CUDA, too; else "none".
        nccl: the folder with NCCL's headers, where Horovod is built with NCCL.
        note: a line for the user, where it might have been expected otherwise.
    """

    version: str = "none"
    nccl: Path | None = None
    note: str = ""


def choose_cuda(frameworks: list[str], environment: Mapping[str, str]) -> CudaChoice:
    """Build with CUDA where the framework has it and the toolkit is complete, otherwise for CPUs.

    Horovod's own CMake turns CUDA on for a torch with CUDA wherever it finds a toolkit, and fails if that is incomplete.

    Raises:
        CannotBuild: the environment asks for a GPU's operations, and something that they need is missing.
    """
    if environment.get("HOROVOD_GPU") == "ROCM":
        return CudaChoice("ROCm")
    asked = [name for name in sorted(environment) if name.startswith("HOROVOD_GPU") and environment[name]]
    version = cuda_of_torch() if "torch" in frameworks else _nvcc_version() if nccl_home() else None
    home = cuda_home(environment)
    if version is None:
        problem = "a framework that was built without CUDA"
    elif home is None:
        problem = "no CUDA toolkit (neither CUDA_HOME is set nor is nvcc in PATH)"
    else:
        missing = missing_of_cuda(home)
        if missing is None:
            nccl = nccl_home()
            note = "" if nccl else "building without NCCL: found no nccl.h with libnccl.so or libnccl_static.a (libnccl-dev)"
            return CudaChoice(version, nccl, note)
        problem = f"an incomplete CUDA toolkit in {home}: {missing}"
    if asked:
        name = asked[0]
        raise CannotBuild(
            f"  {name}={environment[name]}: expected a framework with CUDA and a complete toolkit, got {problem} "
            f"(unset {name} to build for CPUs)"
        )
    return CudaChoice(note=f"building for CPUs: {problem}" if version and home else "")


def cuda_of_torch() -> str | None:
    """The version of CUDA that the installed torch was built for, without importing torch."""
    spec = find_spec("torch")
    places = (spec.submodule_search_locations or []) if spec else []
    files = [Path(place) / "version.py" for place in places if (Path(place) / "version.py").exists()]
    return runpy.run_path(str(files[0])).get("cuda") if files else None


def cuda_home(environment: Mapping[str, str]) -> Path | None:
    """Where torch, and with it Horovod's build, takes a CUDA toolkit to be (CUDA_HOME in torch.utils.cpp_extension)."""
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    if named:
        return Path(named)
    if nvcc:
        return Path(nvcc).parent.parent
    return Path("/usr/local/cuda") if Path("/usr/local/cuda").exists() else None


def missing_of_cuda(home: Path) -> str | None:
    """What Horovod's build needs and the CUDA toolkit does not have, in words; None if it is complete. CMake itself looks for it,
    as the build will do, which takes seconds.
    """
    if not shutil.which("nvcc") and not (home / "bin/nvcc").exists():
        return "nvcc is missing"
    with tempfile.TemporaryDirectory(prefix="hvdtrain-cuda-") as folder:
        project = CUDA_PROBE.replace("@HEADERS@", " ".join(CUDA_HEADERS)).replace("@HOME@", str(home))
        Path(folder, "CMakeLists.txt").write_text(project)
        tried = subprocess.run(["cmake", "-S", folder, "-B", f"{folder}/build"], capture_output=True, text=True)
    if tried.returncode == 0:
        return None
    blocks = re.findall(r"CMake Error.*?:\n((?:  .*\n|\n)+)", tried.stderr)
    return " ".join(blocks[0].split()) if blocks else "CMake does not find it"


def nccl_home() -> Path | None:
    """The folder with NCCL's header and a library to link with, where CUDA's compiler is there too; None on a machine without.

    The package nvidia-nccl-cu13 has libnccl.so.2 only, which Horovod's CMake does not link with.
    """
    if not shutil.which("nvcc"):
        return None
    wheel = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    places = [Path(place) for place in (wheel.submodule_search_locations or [])] if wheel else []
    for place in [*places, Path("/usr"), Path("/usr/local"), Path("/usr/local/cuda")]:
        libraries = [*place.glob("lib*/libnccl*"), *place.glob("lib/*/libnccl*")]
        if (place / "include/nccl.h").exists() and {"libnccl.so", "libnccl_static.a"} & {path.name for path in libraries}:
            return place
    return None


def write_wrappers(folder: Path, cmake: str, standard: int, with_cuda: bool) -> dict[str, str]:
    """Write the wrappers around the compiler and CMake; return the environment variables that make Horovod's build use them."""
    options = f"-std=c++{standard} -g0 -include stdexcept -include cstdint"
    wrapper = CMAKE_WRAPPER.format(
        cmake=shlex.quote(cmake), include=shlex.quote(str(HOROVOD_CMAKE)), options="" if with_cuda else WITHOUT_CUDA
    )
    files = {"CXX": folder / "g++-of-hvdtrain", "HOROVOD_CMAKE": folder / "cmake"}
    files["CXX"].write_text(COMPILER_WRAPPER.format(options=options))
    files["HOROVOD_CMAKE"].write_text(wrapper)
    for path in files.values():
        path.chmod(0o755)
    return {name: str(path) for name, path in files.items()}


def _compile(source: str, standard: int, *options: str) -> str | None:
    """What g++ says to this source; None if it accepts it."""
    command = ["g++", "-x", "c++", f"-std=c++{standard}", *options, "-", "-o", "/dev/null"]
    tried = subprocess.run(command, input=source, capture_output=True, text=True)
    return None if tried.returncode == 0 else tried.stderr or f"g++ ended with status {tried.returncode}"


def _nvcc_version() -> str:
    match = re.search(r"release ([\d.]+)", _output("nvcc", "--version"))
    return match[1] if match else "unknown"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout
