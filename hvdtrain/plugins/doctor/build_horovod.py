"""Build and install Horovod for the frameworks of this Python environment: `python -m hvdtrain build-horovod`.

horovod_recipe.py has what makes its sources compile, and horovod_wheel.py the wheels that are kept or copied to other machines.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.plugins.doctor import horovod_recipe as recipe
from hvdtrain.plugins.doctor.horovod_wheel import built_for, label, matching_wheel, misfits
from hvdtrain.plugins.doctor.packages import is_older

# The newest versions that were tested (docs/status.md has the table). A build with newer ones is tried, after a note.
TRIED = {"torch": "2.15.0", "tensorflow": "2.21.0", "python": "3.14", "compiler": "16.2", "mpi": "6.0.0"}

FRAMEWORKS = ("torch", "tensorflow")

# A line of the compiler's or the linker's, not of pip's summary.
ERROR = re.compile(r"\b(fatal )?error: (?!subprocess-exited|metadata-generation)\S|undefined reference to|cannot find -l")


def main(arguments: list[str] | None = None) -> int:
    """Build Horovod, or take the wheel of an earlier build, install it and test it; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdtrain build-horovod",
        description=f"Build Horovod {recipe.HOROVOD_VERSION} for the torch and tensorflow of this Python, with MPI and Gloo "
        "(and CUDA and NCCL where torch has CUDA and its compiler and headers are found). Takes less than two minutes on two "
        "cores, or seconds with the wheel of an earlier build for the same versions.",
    )
    parser.add_argument("--log", type=Path, default=Path("horovod-build.log"), help="where the build's output goes")
    parser.add_argument(
        "--wheel-dir",
        type=Path,
        help="where built wheels are kept and looked for; a wheel for these versions is there afterwards, to be installed on "
        f"other machines (default: {_default_wheel_dir()})",
    )
    parser.add_argument(
        "--install",
        type=Path,
        metavar="WHEEL",
        help="install this wheel, or the one in this folder that fits; build nothing. If none fits, explain why",
    )
    parser.add_argument(
        "--force", action="store_true", help="build again even if the installed Horovod works, or a wheel is kept"
    )
    options = parser.parse_args(arguments)
    frameworks = [name for name in FRAMEWORKS if find_spec(name)]
    try:
        if options.install:
            return _install_only(options.install, frameworks, options.log)
        return _work(options, frameworks)
    except recipe.CannotBuild as error:
        print(f"Horovod cannot be built yet:\n{error}", file=sys.stderr)
        return 1


def _work(options: argparse.Namespace, frameworks: list[str]) -> int:
    """Install the wheel of an earlier build, or build one, unless an installed Horovod works; return the exit status."""
    if missing := _missing(frameworks):
        raise recipe.CannotBuild("\n".join(missing))
    works = not options.force and _problem(frameworks) is None
    if works and options.wheel_dir is None:
        return _works(frameworks, state="is installed and works")
    cuda = recipe.choose_cuda(frameworks, os.environ)
    versions = built_for(frameworks, cuda, os.environ)
    wheel_dir = options.wheel_dir or _default_wheel_dir()
    places = [wheel_dir, _default_wheel_dir()]
    wheel = None if options.force else next((built for place in places if (built := matching_wheel(place, versions))), None)
    if wheel and (works or (_install(wheel, options.log) and _problem(frameworks) is None)):
        problem = None if wheel.parent == wheel_dir else _copy_wheel(wheel, wheel_dir)
        return _refuse_folder(problem) if problem else _works(frameworks, wheel)
    problem = _unwritable(wheel_dir)
    if problem and options.wheel_dir:
        return _refuse_folder(problem)
    if problem:
        print(f"the wheel will not be kept: {problem}")
    return _build_and_install(frameworks, cuda, versions, None if problem else wheel_dir, options.log)


def newer_than_tried(versions: dict[str, str]) -> list[str]:
    """Lines about versions that are newer than the newest that was tested.

    >>> newer_than_tried({"torch": "torch 2.15.0+cu132", "compiler": "g++ (Debian 17.1.0-3) 17.1.0", "mpi": "Open MPI 5.0.7"})
    ['g++ 17.1.0 is newer than 16.2, the newest that this was tried with: trying']
    """
    lines = []
    for name, newest in TRIED.items():
        match = re.search(r"[\d.]*\d(?=\S*$)" if name == "compiler" else r"\d[\d.]*", versions.get(name, ""))
        numbers = ".".join(match[0].split(".")[: newest.count(".") + 1]) if match else ""
        foreign = name == "mpi" and not versions.get(name, "").startswith("Open MPI")
        if match and not foreign and is_older(newest, numbers):
            called = {"compiler": "g++", "mpi": "Open MPI", "python": "Python"}.get(name, name)
            lines.append(f"{called} {match[0]} is newer than {newest}, the newest that this was tried with: trying")
    return lines


def error_lines(log: str, limit: int = 12) -> list[str]:
    """The errors of the compiler, linker, CMake and pip in a build's log, each once and with its details; the last 20 lines if
    there are none. In a parallel build, the errors are far from the end of the log.
    """
    lines = log.splitlines()
    errors: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        text = line.lstrip()
        if text.startswith("CMake Error"):
            details = [line.strip() for line in lines[number + 1 : number + 12] if line.strip()]
            ends = ("--", "CMake", "Call Stack", "See also")
            end = next((index for index, detail in enumerate(details) if detail.startswith(ends)), len(details))
            errors.setdefault(text, [f"  {detail}" for detail in details[: min(end, 6)]])
        elif ERROR.search(line) or (line.startswith("ERROR: ") and "Failed" not in line):
            errors.setdefault(text, [])
    if not errors:
        return lines[-20:]
    shown = [text for line, details in list(errors.items())[:limit] for text in (line, *details)]
    return [*shown, *([f"... and {len(errors) - limit} more"] if len(errors) > limit else [])]


def _install_only(place: Path, frameworks: list[str], log: Path) -> int:
    """Install the wheel, or the wheel in a folder, that fits this machine; print why if none does."""
    wheels = sorted(place.glob("horovod-*.whl")) if place.is_dir() else [place]
    if not wheels or not wheels[0].exists():
        print(f"--install: expected a wheel that build-horovod made, or a folder with one, got {place}", file=sys.stderr)
        return 1
    if not frameworks:
        raise recipe.CannotBuild(_missing(frameworks)[0])
    here = built_for(frameworks, recipe.choose_cuda(frameworks, os.environ), os.environ)
    reasons = {wheel: misfits(wheel, here) for wheel in wheels}
    fitting = [wheel for wheel, why in reasons.items() if not why]
    if not fitting:
        lines = [f"no wheel fits that is in {place}:" if place.is_dir() else "this wheel does not fit:"]
        lines += [f"  {wheel.name}:\n    " + "\n    ".join(why) for wheel, why in reasons.items()]
        print("\n".join(lines), file=sys.stderr)
        return 1
    newest = max(fitting, key=lambda wheel: wheel.stat().st_mtime)
    if not _install(newest, log):
        return _report_failure(log, "installing the wheel failed")
    if broken := _problem(frameworks):
        print(f"{newest} was installed but does not work:\n{broken}", file=sys.stderr)
        return 1
    return _works(frameworks, newest)


def _build_and_install(
    frameworks: list[str], cuda: recipe.CudaChoice, versions: dict[str, str], wheel_dir: Path | None, log: Path
) -> int:
    """Build Horovod, install it and test it; keep the wheel if a folder is given. Return the exit status."""
    standard, why = recipe.cxx_standard(frameworks)
    for line in [*newer_than_tried(versions), *([cuda.note] if cuda.note else []), f"compiling as {why}"]:
        print(line, flush=True)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as folder:
        wheel = _build(frameworks, standard, cuda, log, Path(folder))
        if wheel is None:
            return _report_failure(log, "building Horovod failed")
        if wheel_dir:
            try:
                wheel = label(wheel, versions, wheel_dir)
            except OSError as error:
                print(f"the wheel is not kept: {error}")
        if not _install(wheel, log):
            return _report_failure(log, "installing Horovod failed")
    if broken := _problem(frameworks):
        if wheel.parent == wheel_dir:
            wheel.unlink()
        print(f"Horovod was built but does not work:\n{broken}\nThe build's log: {log}", file=sys.stderr)
        return 1
    return _works(frameworks, wheel if wheel.parent == wheel_dir else None)


def _works(frameworks: list[str], wheel: Path | None = None, state: str = "works") -> int:
    print(f"Horovod {recipe.HOROVOD_VERSION} {state} with {' and '.join(frameworks)}{f': the wheel {wheel}' if wheel else ''}")
    return 0


def _report_failure(log: Path, failure: str) -> int:
    print("\n".join([*error_lines(log.read_text(errors="replace")), "", f"{failure}; the whole log: {log}"]), file=sys.stderr)
    return 1


def _default_wheel_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hvdtrain/wheels"


def _unwritable(wheel_dir: Path) -> str | None:
    """Create the folder if needed; return why no wheel can be written to it, or None."""
    try:
        wheel_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(wheel_dir, os.W_OK) else f"{wheel_dir}, which cannot be written"


def _copy_wheel(wheel: Path, wheel_dir: Path) -> str | None:
    """Copy the wheel into the folder; return why that failed, or None."""
    problem = _unwritable(wheel_dir)
    try:
        if problem is None:
            shutil.copy(wheel, wheel_dir)
    except OSError as error:
        return str(error)
    return problem


def _refuse_folder(problem: str) -> int:
    print(f"--wheel-dir: expected a folder that can be written, got {problem}", file=sys.stderr)
    return 1


def _missing(frameworks: list[str]) -> list[str]:
    """The packages and programs to install before Horovod can be built, one line each."""
    lines = []
    if not frameworks:
        lines.append(
            "  no framework is installed: pip install torch (or tensorflow-cpu). PyPI's torch for Linux carries gigabytes of "
            "CUDA; without: pip install torch --index-url https://download.pytorch.org/whl/cpu"
        )
    for program, package in (("g++", "g++"), ("cmake", "cmake"), ("make", "make"), ("mpicxx", "libopenmpi-dev openmpi-bin")):
        if not shutil.which(program):
            lines.append(f"  {program} is not installed: apt-get install {package}")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        lines.append(f"  Python.h is not in {headers}: apt-get install python3-dev (or the headers of this Python)")
    for module in ("setuptools", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "yaml"):
        if not find_spec(module):
            lines.append(f"  {module} is not installed: pip install {'pyyaml' if module == 'yaml' else module}")
    return lines


def _problem(frameworks: list[str]) -> str | None:
    """Why the installed Horovod does not work with these frameworks, or None if it does. Each is tested in its own process."""
    importlib.invalidate_caches()
    if not find_spec("horovod"):
        return "Horovod is not installed"
    for framework in frameworks:
        check = f"import horovod.{framework} as hvd; assert hvd.mpi_built() and hvd.gloo_built()"
        result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
        if result.returncode != 0:
            return result.stderr.strip()
    return None


def _build(frameworks: list[str], standard: int, cuda: recipe.CudaChoice, log: Path, folder: Path) -> Path | None:
    """Let pip build the wheel in the folder with the settings Horovod needs, and show the compiler's progress."""
    with_cuda = cuda.version != "none"
    environment = dict(
        os.environ,
        **recipe.write_wrappers(folder, os.environ.get("HOROVOD_CMAKE", "cmake"), standard, with_cuda),
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_MXNET="1",
        MAKEFLAGS=f"-j{len(os.sched_getaffinity(0))}",
    )
    for framework, name in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        environment[f"HOROVOD_WITH{'' if framework in frameworks else 'OUT'}_{name}"] = "1"
    if cuda.nccl:
        environment.update(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_NCCL_HOME=str(cuda.nccl))
    # pip caches wheels by version only, so its cache might return one that was built for other frameworks.
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-binary", "horovod", "--no-cache-dir"]
    command += ["--no-deps", "--wheel-dir", str(folder), f"horovod=={recipe.HOROVOD_VERSION}"]
    libraries = f"MPI, Gloo{', CUDA' if with_cuda else ''}{', NCCL' if cuda.nccl else ''}"
    title = f"building Horovod {recipe.HOROVOD_VERSION} for {' and '.join(frameworks)} with {libraries}"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.5)
            _show(title, log, time.monotonic() - started)
    print(f"{chr(13) if sys.stdout.isatty() else ''}{title} ... {time.monotonic() - started:.0f} s")
    return next(folder.glob("*.whl"), None) if process.returncode == 0 else None


def _install(wheel: Path, log: Path) -> bool:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        for options in (["--force-reinstall", "--no-deps"], []):
            command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode != 0:
                return False
    return True


def _show(title: str, log: Path, seconds: float) -> None:
    """On a terminal, show make's percentage in a line that is overwritten."""
    if sys.stdout.isatty():
        done = re.findall(r"\[ *(\d+)%\]", log.read_text(errors="replace"))
        print(f"\r{title} ... {done[-1] if done else 0} % after {seconds:.0f} s ", end="", flush=True)
