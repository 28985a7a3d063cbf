"""Whether mpirun, Horovod and mpi4py speak of the same MPI. Where they do not, N processes become N jobs of size 1."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.doctor.findings import Finding, ok, problem, warning
from hvdtrain.doctor.packages import PythonProbe, installed, output

OF_LIBRARY = """
import ctypes
text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
ctypes.CDLL({path!r}).MPI_Get_library_version(text, ctypes.byref(length))  # the one call that MPI need not be started for
found["version"] = text.value.decode()
"""

OF_MPI4PY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
found["version"] = MPI.Get_library_version()
"""


def implementation(text: str) -> tuple[str, str] | None:
    """Which MPI, and its version: from what `mpirun --version` or MPI_Get_library_version say.

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
    for name, pattern in patterns:
        match = re.search(pattern, text)
        if match:
            return name, match[1]
    return None


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
    """What `mpirun`, Horovod and mpi4py are of, in words: 'Open MPI 4.1.4'; 'none' where one is not there."""
    probes = {}
    library = _of_horovod()
    if library is not None:
        probes["Horovod"] = PythonProbe(OF_LIBRARY.format(path=library))
    if installed("mpi4py") is not None:
        probes["mpi4py"] = PythonProbe(OF_MPI4PY)
    found = {"mpirun": "none"}
    if shutil.which("mpirun"):
        _, said = output(["mpirun", "--version"])
        found["mpirun"] = _words(said)
    for name, probe in probes.items():
        answer, error = probe.result()
        found[name] = _words(answer["version"]) if answer else f"unusable: {error}"
    return found


def check_mpi(found: dict[str, str], launcher: str | None) -> list[Finding]:
    """Whether all that is there is of one MPI.

    Args:
        found: what `versions` found.
        launcher: who started this process, as comm/launch.py names it.

    >>> print(check_mpi({"mpirun": "MPICH 4.0.2", "Horovod": "Open MPI 4.1.4"}, None)[0].level)
    problem
    """
    findings = []
    for name, what in found.items():
        if what.startswith("unusable"):
            how = "python -m hvdtrain build-horovod --force" if name == "Horovod" else "pip install --force-reinstall mpi4py"
            findings.append(
                problem("MPI", f"expected {name} to load its MPI library, got {what.removeprefix('unusable: ')}", how)
            )
    usable = {name: what for name, what in found.items() if what != "none" and not what.startswith("unusable")}
    if found["mpirun"] == "none" and launcher is None:
        what = "mpirun is not in PATH: several ranks need it, or srun, torchrun, horovodrun"
        findings.append(warning("MPI", what, "apt-get install openmpi-bin, or load your cluster's module"))
    by_name = {name: what.rpartition(" ")[0] for name, what in usable.items()}
    by_major = {name: what.split(".")[0] for name, what in usable.items()}
    all_of = ", ".join(f"{name} of {what}" for name, what in usable.items())
    if len(set(by_name.values())) > 1:
        what = f"expected one MPI, got {all_of}: every process would be a job of its own, without a word"
        findings.append(
            problem("MPI", what, "put the mpirun of Horovod's MPI first in PATH, or build Horovod anew for the other")
        )
    elif len(set(by_major.values())) > 1:
        findings.append(
            warning("MPI", f"expected one version, got {all_of}", "use the mpirun of the MPI that Horovod was built for")
        )
    elif usable and not findings:
        findings.append(ok("MPI", all_of))
    return findings


def check_srun() -> list[Finding]:
    """Whether Slurm, where there is one, can start MPI processes with srun."""
    if not shutil.which("srun"):
        return []
    status, said = output(["srun", "--mpi=list"], seconds=10)
    if status != 0:
        return [ok("Slurm", f"srun is there but reaches no cluster: {said.splitlines()[-1] if said else 'no answer'}")]
    kinds = srun_kinds(said)
    if "pmix" in kinds:
        return [ok("Slurm", "srun --mpi=pmix can start Open MPI processes")]
    what = f"srun knows --mpi={','.join(kinds)}, but not pmix: Horovod over Open MPI cannot be started by it"
    return [warning("Slurm", what, "use mpirun inside the allocation")]


def srun_kinds(text: str) -> list[str]:
    """What `srun --mpi=list` lists.

    >>> srun_kinds("MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n\\tpmix\\nspecific pmix plugin versions available: pmix_v4")
    ['none', 'pmi2', 'pmix']
    """
    return re.findall(r"^\s+(?:srun: )?(\w+)\s*$", text.split("specific")[0], flags=re.MULTILINE)


def _of_horovod() -> str | None:
    """The MPI library of the installed Horovod; None: it was built without MPI, is not there, or ldd is not."""
    spec = find_spec("horovod")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for shared_object in sorted(Path(place).glob("*/mpi_lib*.so")):
            status, said = output(["ldd", str(shared_object)])
            library = mpi_library(said) if status == 0 else None
            if library:
                return library
    return None


def _words(text: str) -> str:
    found = implementation(text)
    return " ".join(found) if found else f"unusable: {text.splitlines()[0] if text else 'no answer'}"
