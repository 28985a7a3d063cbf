"""Other programs' answers; Python, the packages that training needs, and what Horovod was built with."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hvdtrain.comm import launch
from hvdtrain.doctor.findings import Finding, ok, problem, warning
from hvdtrain.version import __version__

OF_A_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "ORTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")
"""Prefixes of the variables by which an MPI process joins its job; a child process must not inherit them."""


def environment_alone() -> dict[str, str]:
    """This process's environment without the variables that would make a child a rank of the same MPI job."""
    return {name: value for name, value in launch.environment().items() if not name.startswith(OF_A_LAUNCHER)}


def output(command: Sequence[str], seconds: float = 20) -> tuple[int | None, str]:
    """A command's exit status and output, stderr last; None and the reason if it cannot be run or takes too long."""
    try:
        done = subprocess.run(
            command, env=environment_alone(), capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return None, f"{command[0]}: not found"
    except subprocess.TimeoutExpired:
        return None, f"{command[0]}: no answer within {seconds:.0f} s"
    except OSError as error:
        return None, f"{command[0]}: {error}"
    return done.returncode, (done.stdout + done.stderr).strip()


class PythonProbe:
    """A Python process that fills a dict, so that a framework can be tried without importing it here.

    Args:
        code: puts its results into the dict `found`.
    """

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import json\nfound = {{}}\n{code}\nprint('found:' + json.dumps(found))"],
            env=environment_alone(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self, seconds: float = 120) -> tuple[dict[str, Any] | None, str]:
        """The dict, or None and the last line of the error."""
        try:
            out, err = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return None, f"no answer within {seconds:.0f} s"
        found = [line.removeprefix("found:") for line in out.splitlines() if line.startswith("found:")]
        if found:
            answer: dict[str, Any] = json.loads(found[-1])
            return answer, ""
        return None, (err.strip().splitlines() or [f"ended with status {self._process.returncode}"])[-1]


AT_LEAST = {
    "numpy": "1.26",
    "h5py": "3.10",
    "tqdm": "4.66",
    "torch": "2.4",
    "tensorflow": "2.18",
    "horovod": "0.28.1",
    "mpi4py": "4.0",
}
"""The oldest versions that are known to work; setup.py has the same."""

OTHER_NAMES = {"tensorflow": ("tensorflow", "tensorflow-cpu")}
"""Distributions that provide a package."""


def installed(package: str) -> str | None:
    """A package's version, without importing it."""
    for name in OTHER_NAMES.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_older(one: str, other: str) -> bool:
    """Whether one version is older than another.

    >>> is_older("2.9.1", "2.13"), is_older("2.13.0+cpu", "2.13")
    (True, False)
    """
    numbers = [[int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3]] for text in (one, other)]
    return numbers[0] < numbers[1]


def facts() -> dict[str, str]:
    """Versions that should be the same on all hosts."""
    found = {"Python": platform.python_version(), "hvdtrain": __version__}
    return found | {package: installed(package) or "none" for package in AT_LEAST}


def check_packages(framework: str | None, use_horovod: bool) -> list[Finding]:
    """Whether the packages that are needed are installed and recent enough.

    Args:
        framework: the config's; None: any.
        use_horovod: whether the config uses Horovod.
    """
    versions = {package: installed(package) for package in AT_LEAST}
    needed = {"numpy", "h5py", "tqdm"} | ({framework} if framework else set()) | ({"horovod"} if use_horovod else set())
    findings = []
    for package, found in versions.items():
        if found is None and package in needed:
            how = "python -m hvdtrain build-horovod" if package == "horovod" else f"pip install {package}"
            findings.append(problem("packages", f"expected {package} {AT_LEAST[package]} or newer, got none", how))
        elif found is not None and is_older(found, AT_LEAST[package]):
            newer = f"pip install '{package}>={AT_LEAST[package]}'"
            findings.append(problem("packages", f"expected {package} {AT_LEAST[package]} or newer, got {found}", newer))
    if framework is None and versions["torch"] is None and versions["tensorflow"] is None:
        findings.append(problem("packages", "expected torch or tensorflow, got neither", "pip install torch"))
    there = ", ".join(f"{package} {found}" for package, found in versions.items() if found)
    return [ok("packages", f"Python {platform.python_version()} ({sys.executable}), hvdtrain {__version__}, {there}"), *findings]


PROBE = """
import {framework} as framework
found["version"] = framework.__version__
{gpu}
try:
    import horovod.{framework} as hvd
    for name in ("mpi", "gloo", "nccl"):
        found[name] = bool(getattr(hvd, name + "_built")())
except Exception as error:
    found["error"] = f"{{type(error).__name__}}: {{error}}".splitlines()[0]
"""

GPUS = {
    "torch": 'found["cuda"], found["gpus"] = framework.version.cuda, framework.cuda.device_count()',
    "tensorflow": 'found["cuda"] = framework.sysconfig.get_build_info().get("cuda_version")\n'
    'found["gpus"] = len(framework.config.list_physical_devices("GPU"))',
}


def start_probes(framework: str | None) -> dict[str, PythonProbe]:
    """Start processes that import the framework (None: each that is installed) and Horovod, which takes seconds."""
    wanted = [framework] if framework else ["torch", "tensorflow"]
    return {name: PythonProbe(PROBE.format(framework=name, gpu=GPUS[name])) for name in wanted if installed(name)}


def check_horovod(framework: str, probe: PythonProbe, use_horovod: bool, gpus: int) -> list[Finding]:
    """Whether a framework can be imported and Horovod was built for it, with MPI, Gloo and, where there are GPUs, NCCL.

    Args:
        gpus: the number of GPUs that nvidia-smi lists on this host.
    """
    found, error = probe.result()
    if found is None:
        return [problem(framework, f"expected to be imported, got {error}", f"reinstall {framework}")]
    findings = []
    if gpus and not found["gpus"]:
        what = f"expected to use the host's {gpus} GPUs, got none ({found['version']}, built for CUDA {found['cuda'] or 'none'})"
        findings.append(warning(framework, what, f"install a {framework} with CUDA that the driver supports"))
    rebuild = "python -m hvdtrain build-horovod --force"
    if "error" in found:
        if installed("horovod") is None and not use_horovod:
            return [*findings, ok("Horovod", "not installed, and not asked for")]
        level = problem if use_horovod else warning
        return [*findings, level("Horovod", f"expected to work with {framework}, got {found['error']}", rebuild)]
    built = [name for name, there in (("MPI", found["mpi"]), ("Gloo", found["gloo"]), ("NCCL", found["nccl"])) if there]
    about = f"Horovod for {framework}"
    if not found["mpi"] and not found["gloo"]:
        findings.append(problem(about, "expected MPI or Gloo to be built in, got neither", rebuild))
    elif not found["mpi"]:
        findings.append(
            warning(about, "built without MPI: mpirun and srun --mpi cannot start it", f"horovodrun --gloo, or {rebuild}")
        )
    if gpus and not found["nccl"]:
        what = "built without NCCL: gradients are copied through the host's memory"
        findings.append(warning(about, what, f"HOROVOD_GPU_OPERATIONS=NCCL {rebuild}"))
    return findings or [ok(about, f"built with {', '.join(built)}")]
