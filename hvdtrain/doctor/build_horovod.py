"""Build and install Horovod for the frameworks of this Python environment: `python -m hvdtrain build-horovod`.

Horovod 0.28.1 is the last release and older than today's frameworks. Three things make its unedited source build:
pip must not isolate the build (Horovod compiles against the torch and tensorflow that are installed), every file must be
C++17 (the sources ask for C++14, which torch's headers refuse), and Horovod's XLA kernels must stay out (the TensorFlow
wheel does not carry all headers they include). A wrapper around the C++ compiler sees to the last two.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

HOROVOD_VERSION = "0.28.1"

# The last -std wins. xla_mpi_ops.cc compiles to nothing where TensorFlow is older than 2.6.
COMPILER_WRAPPER = """\
#!/bin/sh
case "$*" in
    *xla_mpi_ops.cc*) exec g++ "$@" -std=c++17 -UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=2005000000 ;;
    *) exec g++ "$@" -std=c++17 ;;
esac
"""


def main(arguments: list[str] | None = None) -> int:
    """Build Horovod, install it and try it out; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain build-horovod",
        description=f"Build Horovod {HOROVOD_VERSION} for the torch and tensorflow of this Python, with MPI and Gloo "
        "(and NCCL where CUDA's compiler and NCCL's headers are found). Takes about three minutes on two cores.",
    )
    parser.add_argument("--log", type=Path, default=Path("horovod-build.log"), help="where the build's output goes")
    parser.add_argument("--force", action="store_true", help="build again even if the installed Horovod works")
    options = parser.parse_args(arguments)
    frameworks = [name for name in ("torch", "tensorflow") if find_spec(name)]
    missing = _missing(frameworks)
    if missing:
        print("\n".join(["Horovod cannot be built yet:", *missing]), file=sys.stderr)
        return 1
    if not options.force and _problem(frameworks) is None:
        print(f"Horovod {HOROVOD_VERSION} is installed and works with {' and '.join(frameworks)}")
        return 0
    # pip keeps built wheels, but by version only: one that was built for other frameworks is found out and replaced.
    for pip_options in ([], ["--no-cache-dir", "--force-reinstall", "--no-deps"]):
        if options.force and not pip_options:
            continue
        if not _install(frameworks, options.log, pip_options):
            return 1
        problem = _problem(frameworks)
        if problem is None:
            print(f"Horovod {HOROVOD_VERSION} works with {' and '.join(frameworks)}")
            return 0
    print(f"Horovod was built but does not work:\n{problem}\nThe build's log: {options.log}", file=sys.stderr)
    return 1


def _missing(frameworks: list[str]) -> list[str]:
    """What has to be installed before Horovod can be built, one line each."""
    lines = []
    if not frameworks:
        lines.append("  no framework is installed: pip install torch (or tensorflow)")
    for program, package in (("g++", "g++"), ("cmake", "cmake"), ("mpicxx", "libopenmpi-dev openmpi-bin")):
        if not shutil.which(program):
            lines.append(f"  {program} is not installed: apt-get install {package}")
    for module in ("setuptools", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "yaml"):
        if not find_spec(module):
            lines.append(f"  {module} is not installed: pip install {'pyyaml' if module == 'yaml' else module}")
    return lines


def _problem(frameworks: list[str]) -> str | None:
    """Why the installed Horovod cannot be used with these frameworks, or None if it can. Each is tried in its own process."""
    for framework in frameworks:
        check = f"import horovod.{framework} as hvd; assert hvd.mpi_built() and hvd.gloo_built()"
        result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
        if result.returncode != 0:
            return result.stderr.strip()
    return None


def _install(frameworks: list[str], log: Path, pip_options: list[str]) -> bool:
    """Run pip with the settings Horovod needs, showing how far the compiler has come."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as folder:
        compiler = Path(folder) / "g++-17"
        compiler.write_text(COMPILER_WRAPPER)
        compiler.chmod(0o755)
        environment = dict(
            os.environ,
            CXX=str(compiler),
            HOROVOD_WITH_MPI="1",
            HOROVOD_WITH_GLOO="1",
            HOROVOD_WITHOUT_MXNET="1",
            MAKEFLAGS=f"-j{len(os.sched_getaffinity(0))}",
        )
        for framework, name in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
            environment[f"HOROVOD_WITH{'' if framework in frameworks else 'OUT'}_{name}"] = "1"
        nccl = _nccl_home()
        if nccl:
            environment.update(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_NCCL_HOME=str(nccl))
        command = [sys.executable, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-binary", "horovod"]
        command += [*pip_options, f"horovod=={HOROVOD_VERSION}"]
        what = f"building Horovod {HOROVOD_VERSION} for {' and '.join(frameworks)} with MPI, Gloo{', NCCL' if nccl else ''}"
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            while process.poll() is None:
                time.sleep(0.5)
                _show(what, log, time.monotonic() - started)
        seconds = time.monotonic() - started
    print(f"{chr(13) if sys.stdout.isatty() else ''}{what} ... {seconds:.0f} s")
    if process.returncode != 0:
        print("\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr)
        print(f"\nbuilding Horovod failed (pip's exit status {process.returncode}); the log: {log}", file=sys.stderr)
    return process.returncode == 0


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
