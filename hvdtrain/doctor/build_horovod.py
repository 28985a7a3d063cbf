"""Build and install Horovod for the frameworks of this Python environment: `python -m hvdtrain build-horovod`.

Horovod 0.28.1 is the last release and older than today's frameworks. Three things make its unedited source build:
pip must not isolate the build (Horovod compiles against the torch and tensorflow that are installed), every file must be
C++17 (the sources ask for C++14, which torch's headers refuse), and Horovod's XLA kernels must stay out (the TensorFlow
wheel does not carry all headers they include). A wrapper around the C++ compiler sees to the last two.

Two more reduce the processor time to less than a third: no debug information, and horovod.cmake, which makes CMake compile
the files that both frameworks' libraries share only once. The wheel is kept for the next environment with the same versions.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
HOROVOD_CMAKE = Path(__file__).with_name("horovod.cmake")

# The last -std and the last -g win. xla_mpi_ops.cc compiles to nothing where TensorFlow is older than 2.6.
COMPILER_WRAPPER = """\
#!/bin/sh
case "$*" in
    *xla_mpi_ops.cc*) exec g++ "$@" -std=c++17 -g0 -UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=2005000000 ;;
    *) exec g++ "$@" -std=c++17 -g0 ;;
esac
"""

# Horovod's setup.py starts $HOROVOD_CMAKE twice: to configure, which reads horovod.cmake, too, and to build.
CMAKE_WRAPPER = """\
#!/bin/sh
case "$1" in
    --build) exec {cmake} "$@" ;;
    *) exec {cmake} "$@" -DCMAKE_PROJECT_horovod_INCLUDE={include} ;;
esac
"""

# The environment variables that change the build, besides HOROVOD_*.
BUILD_VARIABLES = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_PREFIX_PATH", "MPI_HOME", "CCL_ROOT")

# Instructions that Horovod's build uses if the processor supports them.
PROCESSOR_FLAGS = ("avx", "f16c", "fma")


def main(arguments: list[str] | None = None) -> int:
    """Build Horovod, or take the wheel of an earlier build, install it and try it out; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain build-horovod",
        description=f"Build Horovod {HOROVOD_VERSION} for the torch and tensorflow of this Python, with MPI and Gloo "
        "(and NCCL where CUDA's compiler and NCCL's headers are found). Takes less than two minutes on two cores, or seconds "
        "with the wheel of an earlier build for the same versions.",
    )
    parser.add_argument("--log", type=Path, default=Path("horovod-build.log"), help="where the build's output goes")
    parser.add_argument("--wheel-dir", type=Path, help=f"where built wheels are kept (default: {_default_wheel_dir()})")
    parser.add_argument(
        "--force", action="store_true", help="build again even if the installed Horovod works, or a wheel is kept"
    )
    options = parser.parse_args(arguments)
    frameworks = [name for name in ("torch", "tensorflow") if find_spec(name)]
    missing = _missing(frameworks)
    if missing:
        print("\n".join(["Horovod cannot be built yet:", *missing]), file=sys.stderr)
        return 1
    if not options.force and _problem(frameworks) is None:
        print(f"Horovod {HOROVOD_VERSION} is installed and works with {' and '.join(frameworks)}")
        return 0
    versions = built_for(frameworks)
    wheel_dir = options.wheel_dir or _default_wheel_dir()
    wheel = None if options.force else next(_folder(wheel_dir, versions).glob("*.whl"), None)
    if wheel and _install(wheel, options.log) and _problem(frameworks) is None:
        print(f"Horovod {HOROVOD_VERSION} works with {' and '.join(frameworks)}: the wheel of an earlier build, {wheel}")
        return 0
    problem = _unwritable(wheel_dir)
    if problem and options.wheel_dir:
        print(f"--wheel-dir: expected a folder that can be written, got {problem}", file=sys.stderr)
        return 1
    if problem:
        print(f"the wheel will not be kept: {problem}")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as folder:
        wheel = _build(frameworks, options.log, Path(folder))
        if wheel is None or not _install(wheel, options.log):
            print(_what_failed(options.log), file=sys.stderr)
            print(f"\nbuilding Horovod failed; the whole log: {options.log}", file=sys.stderr)
            return 1
        broken = _problem(frameworks)
        if broken:
            print(f"Horovod was built but does not work:\n{broken}\nThe build's log: {options.log}", file=sys.stderr)
            return 1
        print(f"Horovod {HOROVOD_VERSION} works with {' and '.join(frameworks)}")
        if not problem:
            _keep(wheel, _folder(wheel_dir, versions), versions)
    return 0


def built_for(frameworks: list[str]) -> dict[str, str]:
    """Everything that a wheel of Horovod depends on, by name; a kept wheel is installed only if all values are equal."""
    recipe = Path(__file__).read_bytes() + HOROVOD_CMAKE.read_bytes()
    found = {
        "horovod": HOROVOD_VERSION,
        "recipe": hashlib.sha256(recipe).hexdigest()[:16],
        "python": f"{sys.version.split()[0]} {sysconfig.get_config_var('EXT_SUFFIX')}",
        "compiler": _first_line("g++", "--version"),
        "libc": (os.confstr("CS_GNU_LIBC_VERSION") or "") if "CS_GNU_LIBC_VERSION" in os.confstr_names else "",
        "mpi": f"{shutil.which('mpicxx')} {_first_line('mpicxx', '--showme:version')} {_first_line('mpirun', '--version')}",
        "processor": " ".join(_processor_flags()),
    }
    nccl = _nccl_home()
    if nccl:
        header = (nccl / "include/nccl.h").read_bytes()
        found["nccl"] = f"{nccl} {hashlib.sha256(header).hexdigest()[:16]}"
        found["cuda"] = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    for framework in frameworks:
        found[framework] = _version(framework)
    found |= {name: os.environ[name] for name in sorted(os.environ) if name in BUILD_VARIABLES or name.startswith("HOROVOD_")}
    return found


def _default_wheel_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hvdtrain/wheels"


def _folder(wheel_dir: Path, versions: dict[str, str]) -> Path:
    """The folder in wheel_dir of the wheel that was built for these versions."""
    key = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()[:16]
    return wheel_dir / f"horovod-{HOROVOD_VERSION}-{key}"


def _unwritable(wheel_dir: Path) -> str | None:
    """Why no wheel can be kept there, or None: then the folder exists."""
    try:
        wheel_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(wheel_dir, os.W_OK) else f"{wheel_dir}, which cannot be written"


def _keep(wheel: Path, folder: Path, versions: dict[str, str]) -> None:
    """Copy the wheel into the folder, with the versions it was built for. The wheel is renamed into place, since another build
    may read it at the same time. An error such as a full disk is only reported, since Horovod is already installed.
    """
    try:
        folder.mkdir(exist_ok=True)
        (folder / "built-for.json").write_text(json.dumps(versions, indent=4) + "\n")
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as new:
            os.replace(shutil.copy(wheel, new), folder / wheel.name)
    except OSError as error:
        print(f"the wheel is not kept: {error}")


def _version(package: str) -> str:
    """The version of a framework, whichever package brings it (tensorflow-cpu has the module tensorflow)."""
    packages = importlib.metadata.packages_distributions().get(package, [package])
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(packages)))


def _first_line(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return lines[0] if lines else ""


def _processor_flags() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return [os.uname().machine, *(flag for flag in PROCESSOR_FLAGS if flags and flag in flags[1].split())]


def _missing(frameworks: list[str]) -> list[str]:
    """What has to be installed before Horovod can be built, one line each."""
    lines = []
    if not frameworks:
        lines.append("  no framework is installed: pip install torch (or tensorflow)")
    for program, package in (("g++", "g++"), ("cmake", "cmake"), ("make", "make"), ("mpicxx", "libopenmpi-dev openmpi-bin")):
        if not shutil.which(program):
            lines.append(f"  {program} is not installed: apt-get install {package}")
    for module in ("setuptools", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "yaml"):
        if not find_spec(module):
            lines.append(f"  {module} is not installed: pip install {'pyyaml' if module == 'yaml' else module}")
    return lines


def _problem(frameworks: list[str]) -> str | None:
    """Why the installed Horovod cannot be used with these frameworks, or None if it can. Each is tried in its own process."""
    importlib.invalidate_caches()
    if not find_spec("horovod"):
        return "Horovod is not installed"
    for framework in frameworks:
        check = f"import horovod.{framework} as hvd; assert hvd.mpi_built() and hvd.gloo_built()"
        result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
        if result.returncode != 0:
            return result.stderr.strip()
    return None


def _build(frameworks: list[str], log: Path, folder: Path) -> Path | None:
    """Let pip build the wheel in the folder with the settings Horovod needs, showing how far the compiler has come."""
    environment = dict(
        os.environ,
        CXX=str(_script(folder / "g++-17", COMPILER_WRAPPER)),
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_MXNET="1",
        MAKEFLAGS=f"-j{len(os.sched_getaffinity(0))}",
    )
    cmake = shlex.quote(os.environ.get("HOROVOD_CMAKE", "cmake"))
    wrapper = CMAKE_WRAPPER.format(cmake=cmake, include=shlex.quote(str(HOROVOD_CMAKE)))
    environment["HOROVOD_CMAKE"] = str(_script(folder / "cmake", wrapper))
    for framework, name in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        environment[f"HOROVOD_WITH{'' if framework in frameworks else 'OUT'}_{name}"] = "1"
    nccl = _nccl_home()
    if nccl:
        environment.update(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_NCCL_HOME=str(nccl))
    # pip keeps built wheels itself, but by version only, so that it would hand out one that was built for other frameworks.
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-binary", "horovod", "--no-cache-dir"]
    command += ["--no-deps", "--wheel-dir", str(folder), f"horovod=={HOROVOD_VERSION}"]
    what = f"building Horovod {HOROVOD_VERSION} for {' and '.join(frameworks)} with MPI, Gloo{', NCCL' if nccl else ''}"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.5)
            _show(what, log, time.monotonic() - started)
    print(f"{chr(13) if sys.stdout.isatty() else ''}{what} ... {time.monotonic() - started:.0f} s")
    return next(folder.glob("*.whl"), None) if process.returncode == 0 else None


def _install(wheel: Path, log: Path) -> bool:
    """Install the wheel and the packages it asks for, in place of any Horovod that is there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        for options in (["--force-reinstall", "--no-deps"], []):
            command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode != 0:
                return False
    return True


def _what_failed(log: Path) -> str:
    """The first errors in the log, which are far from its end after a parallel build, and its last lines."""
    lines = log.read_text(errors="replace").splitlines()
    end = len(lines) - 20
    errors = [line for line in lines[: max(end, 0)] if re.search(r"\berror:|CMake Error", line)][:5]
    return "\n".join([*errors, *(["..."] if errors else []), *lines[max(end, 0) :]])


def _script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def _show(what: str, log: Path, seconds: float) -> None:
    """On a terminal: one line that is written over, with make's own percentage."""
    if sys.stdout.isatty():
        done = re.findall(r"\[ *(\d+)%\]", log.read_text(errors="replace"))
        print(f"\r{what} ... {done[-1] if done else 0} % after {seconds:.0f} s ", end="", flush=True)


def _nccl_home() -> Path | None:
    """The folder with include/nccl.h, where CUDA's compiler is there too; None on a machine without."""
    if not shutil.which("nvcc"):
        return None
    wheel = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    places = [Path(place) for place in (wheel.submodule_search_locations or [])] if wheel else []
    for place in [*places, Path("/usr"), Path("/usr/local"), Path("/usr/local/cuda")]:
        if (place / "include/nccl.h").exists():
            return place
    return None


if __name__ == "__main__":
    sys.exit(main())
