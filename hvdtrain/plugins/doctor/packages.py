"""The output of other programs; Python, the packages that training needs, how Horovod was built, and the MPIs in use."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.comm import this_process
from hvdtrain.plugins.doctor.findings import Finding, libraries, ok, problem, warning
from hvdtrain.version import __version__

OF_A_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "ORTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")
"""Prefixes of the variables by which an MPI process joins its job; a child process must not inherit them."""


def environment_alone() -> dict[str, str]:
    """This process's environment without the variables that would make a child a rank of the same MPI job."""
    return {name: value for name, value in this_process.environment().items() if not name.startswith(OF_A_LAUNCHER)}


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    environment = environment_alone()
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)


def output(command: Sequence[str], seconds: float = 20) -> tuple[int | None, str]:
    """A command's exit status and output, stderr last; None and the reason if it cannot be run or takes too long."""
    try:
        done = _run(command, seconds)
    except FileNotFoundError:
        return None, f"{command[0]}: not found"
    except subprocess.TimeoutExpired:
        return None, f"{command[0]}: no answer within {seconds:.0f} s"
    except OSError as error:
        return None, f"{command[0]}: {error}"
    return done.returncode, (done.stdout + done.stderr).strip()


Answer = tuple[dict[str, Any] | None, str]
"""What `ask_python` returns."""


def ask_python(code: str, seconds: float = 120) -> Answer:
    """Test a framework in another Python process, without importing it in this one.

    Args:
        code: puts its results into the dict `found`.

    Returns:
        The dict, or None and the last line of the error.
    """
    program = f"import json\nfound = {{}}\n{code}\nprint('found:' + json.dumps(found))"
    try:
        done = _run([sys.executable, "-c", program], seconds)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {seconds:.0f} s"
    answers = [line.removeprefix("found:") for line in done.stdout.splitlines() if line.startswith("found:")]
    if answers:
        return json.loads(answers[-1]), ""
    return None, (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]


AT_LEAST = {
    "numpy": "1.26",
    "h5py": "3.10",
    "tqdm": "4.66",
    "torch": "2.4",
    "tensorflow": "2.18",
    "horovod": "0.28.1",
    "mpi4py": "4.0",
}
"""The oldest versions that are known to work; pyproject.toml has the same."""

OTHER_NAMES = {"tensorflow": ("tensorflow", "tensorflow-cpu")}
"""The distributions that provide a package."""


def installed_version(package: str) -> str | None:
    """A package's version, without importing it."""
    for name in OTHER_NAMES.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_older(version: str, least: str) -> bool:
    """Whether one version is older than another.

    >>> is_older("2.9.1", "2.13"), is_older("2.13.0+cpu", "2.13")
    (True, False)
    """
    numbers = [[int(digits) for digits in re.findall(r"\d+", text.split("+")[0])[:3]] for text in (version, least)]
    return numbers[0] < numbers[1]


def facts() -> dict[str, str]:
    """Versions that should be the same on all hosts."""
    versions = {"Python": platform.python_version(), "hvdtrain": __version__}
    return versions | {package: installed_version(package) or "none" for package in AT_LEAST}


def check_packages(framework: str | None, use_horovod: bool) -> list[Finding]:
    """Whether the packages that are needed are installed and recent enough.

    Args:
        framework: the package that computes for the config's framework; None: any.
        use_horovod: whether the config uses Horovod.
    """
    versions = {package: installed_version(package) for package in AT_LEAST}
    needed = {"numpy", "h5py", "tqdm"} | ({framework} if framework else set()) | ({"horovod"} if use_horovod else set())
    findings = []
    for package, here in versions.items():
        if (package in needed) if here is None else is_older(here, AT_LEAST[package]):
            newer = f"pip install '{package}>={AT_LEAST[package]}'"
            first = "python -m hvdtrain build-horovod" if package == "horovod" else f"pip install {package}"
            text = f"expected {package} {AT_LEAST[package]} or newer, got {here or 'none'}"
            findings.append(problem("packages", text, newer if here else first))
    if framework is None and not any(map(installed_version, libraries())):
        findings.append(problem("packages", f"expected {' or '.join(libraries())}, got none", "pip install torch"))
    installed = ", ".join(f"{package} {here}" for package, here in versions.items() if here)
    text = f"Python {platform.python_version()} ({sys.executable}), hvdtrain {__version__}, {installed}"
    return [ok("packages", text), *findings]


PROBE = """
import gc
gc.disable()  # a third of the time, with gc.freeze
import {framework} as framework
found["version"] = framework.__version__
{gpu}
try:
    import horovod.{framework} as hvd
    for name in ("mpi", "gloo", "nccl"):
        found[name] = bool(getattr(hvd, name + "_built")())
except Exception as error:
    found["error"] = f"{{type(error).__name__}}: {{error}}".splitlines()[0]
gc.freeze()
"""

GPUS = {
    "torch": 'found["cuda"], found["gpus"] = framework.version.cuda, framework.cuda.device_count()',
    "tensorflow": 'found["cuda"] = framework.sysconfig.get_build_info().get("cuda_version")\n'
    'found["gpus"] = len(framework.config.list_physical_devices("GPU"))',
}


def start_probes(framework: str | None, pool: Executor) -> dict[str, Future[Answer]]:
    """Start processes that import the framework (None: each that is installed) and Horovod, which takes seconds."""
    installed = [name for name in ([framework] if framework else libraries()) if installed_version(name)]
    return {name: pool.submit(ask_python, PROBE.format(framework=name, gpu=GPUS.get(name, ""))) for name in installed}


def check_horovod(framework: str, probe: Future[Answer], use_horovod: bool, gpus: int) -> list[Finding]:
    """Whether a framework can be imported and Horovod was built for it, with MPI, Gloo and, where there are GPUs, NCCL.

    Args:
        gpus: the number of GPUs that nvidia-smi lists on this host.
    """
    answer, error = probe.result()
    if answer is None:
        return [problem(framework, f"expected to be imported, got {error}", f"reinstall {framework}")]
    findings = []
    if gpus and not answer["gpus"]:
        cuda = answer["cuda"] or "none"
        text = f"expected to use the host's {gpus} GPUs, got none ({answer['version']}, built for CUDA {cuda})"
        findings.append(warning(framework, text, f"install a {framework} with CUDA that the driver supports"))
    rebuild = "python -m hvdtrain build-horovod --force"
    if "error" in answer:
        if installed_version("horovod") is None and not use_horovod:
            return [*findings, ok("Horovod", "not installed, and not asked for")]
        level = problem if use_horovod else warning
        return [*findings, level("Horovod", f"expected to work with {framework}, got {answer['error']}", rebuild)]
    built = [name for name, is_built in (("MPI", answer["mpi"]), ("Gloo", answer["gloo"]), ("NCCL", answer["nccl"])) if is_built]
    about = f"Horovod for {framework}"
    if not answer["mpi"] and not answer["gloo"]:
        findings.append(problem(about, "expected MPI or Gloo to be built in, got neither", rebuild))
    elif not answer["mpi"]:
        text = "built without MPI: mpirun and srun --mpi cannot start it"
        findings.append(warning(about, text, f"horovodrun --gloo, or {rebuild}"))
    if gpus and not answer["nccl"]:
        text = "built without NCCL: gradients are copied through the host's memory"
        findings.append(warning(about, text, f"HOROVOD_GPU_OPERATIONS=NCCL {rebuild}"))
    return findings or [ok(about, f"built with {', '.join(built)}")]


OF_LIBRARY = """
import ctypes
text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
ctypes.CDLL({path!r}).MPI_Get_library_version(text, ctypes.byref(length))  # allowed before MPI is initialized
found["version"] = text.value.decode()
"""

OF_MPI4PY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
found["version"] = MPI.Get_library_version()
"""


def implementation(text: str) -> tuple[str, str] | None:
    """The name and version of an MPI, from the output of `mpirun --version` or MPI_Get_library_version.

    >>> implementation("mpirun (Open MPI) 4.1.4"), implementation("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4")
    (('Open MPI', '4.1.4'), ('Open MPI', '4.1.4'))
    >>> implementation("HYDRA build details:\\n    Version:    4.0.2\\n"), implementation("MPICH Version:\\t4.0.2\\nMPICH ...")
    (('MPICH', '4.0.2'), ('MPICH', '4.0.2'))
    >>> implementation("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307")
    ('Intel MPI', '2021.9')
    >>> implementation("bash: mpirun: command not found") is None
    True
    """
    patterns = (
        ("Open MPI", r"\(?Open MPI\)? v?([\d.]+)"),
        ("Open MPI", r"OpenRTE\)? v?([\d.]+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*Version ([\d.]+)"),
        ("MVAPICH", r"MVAPICH2? Version\s*:\s*([\d.]+)"),
        ("MPICH", r"HYDRA build details:\s+Version:\s+([\d.]+)"),
        ("MPICH", r"MPICH Version:\s+([\d.]+)"),
    )
    matches = ((name, re.search(pattern, text)) for name, pattern in patterns)
    return next(((name, match[1]) for name, match in matches if match), None)


def mpi_library(ldd: str) -> str | None:
    """The MPI library among those that a shared object needs, from the output of ldd.

    >>> mpi_library("\\tlibmpi_cxx.so.40 => /lib/libmpi_cxx.so.40 (0x7f)\\n\\tlibmpi.so.40 => /lib/libmpi.so.40 (0x7f)")
    '/lib/libmpi.so.40'
    >>> mpi_library("\\tlibmpich.so.12 => not found")
    'libmpich.so.12'
    """
    match = re.search(r"\b(libmpi(?:ch)?\.so[.\d]*)(?: => (/\S+))?", ldd)
    return (match[2] or match[1]) if match else None


def versions() -> dict[str, str]:
    """The MPIs of `mpirun`, Horovod and mpi4py, such as 'Open MPI 4.1.4'; 'none' if one is not installed."""
    codes = {}
    if (library := _horovod_mpi_library()) is not None:
        codes["Horovod"] = OF_LIBRARY.format(path=library)
    if installed_version("mpi4py") is not None:
        codes["mpi4py"] = OF_MPI4PY
    programs = {"mpirun": _words(output(["mpirun", "--version"])[1]) if shutil.which("mpirun") else "none"}
    with ThreadPoolExecutor() as pool:
        for name, (answer, error) in zip(codes, pool.map(ask_python, codes.values()), strict=True):
            programs[name] = _words(answer["version"]) if answer else f"unusable: {error}"
    return programs


def check_mpi(programs: dict[str, str], launcher: str | None) -> list[Finding]:
    """Whether everything uses the same MPI.

    Args:
        programs: the result of `versions`.
        launcher: what started this process, as named in comm/launchers.py.

    >>> print(check_mpi({"mpirun": "MPICH 4.0.2", "Horovod": "Open MPI 4.1.4"}, None)[0].level)
    problem
    """
    findings = []
    for name, release in programs.items():
        if release.startswith("unusable"):
            fix = "python -m hvdtrain build-horovod --force" if name == "Horovod" else "pip install --force-reinstall mpi4py"
            text = f"expected {name} to load its MPI library, got {release.removeprefix('unusable: ')}"
            findings.append(problem("MPI", text, fix))
    usable = {name: version for name, version in programs.items() if version != "none" and not release.startswith("unusable")}
    if programs["mpirun"] == "none" and launcher is None:
        text = "mpirun is not in PATH: several ranks need it, or srun, torchrun, horovodrun"
        findings.append(warning("MPI", text, "apt-get install openmpi-bin, or load your cluster's module"))
    all_of = ", ".join(f"{name} of {release}" for name, release in usable.items())
    if len({release.rpartition(" ")[0] for release in usable.values()}) > 1:
        text = f"expected one MPI, got {all_of}: each process would silently run as a separate job"
        fix = "put the mpirun of Horovod's MPI first in PATH, or build Horovod anew for the other"
        findings.append(problem("MPI", text, fix))
    elif len({release.split(".")[0] for release in usable.values()}) > 1:
        fix = "use the mpirun of the MPI that Horovod was built for"
        findings.append(warning("MPI", f"expected one version, got {all_of}", fix))
    elif usable and not findings:
        findings.append(ok("MPI", all_of))
    return findings


def check_srun() -> list[Finding]:
    """Whether srun, where it is installed, can start MPI processes."""
    if not shutil.which("srun"):
        return []
    status, said = output(["srun", "--mpi=list"], seconds=10)
    if status != 0:
        return [ok("Slurm", f"srun is installed but reaches no cluster: {said.splitlines()[-1] if said else 'no answer'}")]
    kinds = srun_kinds(said)
    if "pmix" in kinds:
        return [ok("Slurm", "srun --mpi=pmix can start Open MPI processes")]
    text = f"srun knows --mpi={','.join(kinds)}, but not pmix: Horovod over Open MPI cannot be started by it"
    return [warning("Slurm", text, "use mpirun inside the allocation")]


def srun_kinds(text: str) -> list[str]:
    """The plugins in the output of `srun --mpi=list`.

    >>> srun_kinds("MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n\\tpmix\\nspecific pmix plugin versions available: pmix_v4")
    ['none', 'pmi2', 'pmix']
    """
    return re.findall(r"^\s+(?:srun: )?(\w+)\s*$", text.split("specific")[0], flags=re.MULTILINE)


def _horovod_mpi_library() -> str | None:
    """The MPI library of the installed Horovod; None: it was built without MPI, or Horovod or ldd is not installed."""
    spec = find_spec("horovod")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for shared_object in sorted(Path(place).glob("*/mpi_lib*.so")):
            status, said = output(["ldd", str(shared_object)])
            if status == 0 and (library := mpi_library(said)):
                return library
    return None


def _words(text: str) -> str:
    words = implementation(text)
    return " ".join(words) if words else f"unusable: {text.splitlines()[0] if text else 'no answer'}"
