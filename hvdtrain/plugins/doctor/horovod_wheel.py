"""Wheels of Horovod that record which environments they fit: kept for the next one, or copied to another machine.

A wheel's name has the versions of the frameworks and of MPI, as pip shows them afterwards:

    horovod-0.28.1+torch2.13.0.cpu.tensorflow.cpu2.21.0.openmpi4-0a1b2c3d4-cp311-cp311-linux_x86_64.whl

Its metadata requires exactly these frameworks, so that `pip check` reports another one, and `built-for.json` in its dist-info
has everything else. The build number (0a1b2c3d4) distinguishes wheels that differ only in that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.plugins.doctor.horovod_recipe import HOROVOD_CMAKE, HOROVOD_VERSION, CudaChoice
from hvdtrain.plugins.doctor.packages import implementation, is_older

# The environment variables that change the build, besides HOROVOD_*.
BUILD_VARIABLES = ("CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_PREFIX_PATH", "MPI_HOME", "CCL_ROOT")

# Instructions that Horovod's build uses if the processor supports them.
PROCESSOR_FLAGS = ("avx", "f16c", "fma")

BUILT_FOR = "built-for.json"


def built_for(frameworks: list[str], cuda: CudaChoice, environment: Mapping[str, str]) -> dict[str, str]:
    """Everything that a wheel of Horovod depends on, by name; a kept wheel is installed only if all values are equal."""
    recipe = Path(__file__).with_name("horovod_recipe.py").read_bytes() + HOROVOD_CMAKE.read_bytes()
    properties = {
        "horovod": HOROVOD_VERSION,
        "recipe": hashlib.sha256(recipe).hexdigest()[:16],
        "python": sys.version.split()[0],
        "abi": str(sysconfig.get_config_var("EXT_SUFFIX")),
        "compiler": _first_line("g++", "--version"),
        "libc": (os.confstr("CS_GNU_LIBC_VERSION") or "") if "CS_GNU_LIBC_VERSION" in os.confstr_names else "",
        "mpi": " ".join(implementation(_first_line("mpirun", "--version")) or ("none",)),
        "mpicxx": f"{shutil.which('mpicxx')} {_first_line('mpicxx', '--showme:version')}",
        "processor": " ".join(_processor_flags()),
        "cuda": cuda.version,
    }
    if cuda.nccl:
        header = (cuda.nccl / "include/nccl.h").read_bytes()
        properties["nccl"] = f"{cuda.nccl} {hashlib.sha256(header).hexdigest()[:16]}"
    for framework in frameworks:
        properties[framework] = _version(framework)
    return properties | {
        name: environment[name] for name in sorted(environment) if name in BUILD_VARIABLES or name.startswith("HOROVOD_")
    }


def matching_wheel(wheel_dir: Path, versions: Mapping[str, str]) -> Path | None:
    """The wheel in the folder that was built for exactly these versions."""
    return next(wheel_dir.glob(f"horovod-{HOROVOD_VERSION}+*-{_build_number(versions)}-*.whl"), None)


def misfits(wheel: Path, here: Mapping[str, str]) -> list[str]:
    """Why a wheel that was built elsewhere does not fit here, one reason each; empty if it does.

    Only the libraries that the wheel is linked with or was compiled against matter: not the compiler, the patch level of Python,
    or where MPI is installed.

    Args:
        here: what `built_for` finds for the frameworks that are installed here.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(f".dist-info/{BUILT_FOR}")]
            built = json.loads(archive.read(name))
    except (OSError, ValueError, zipfile.BadZipFile):
        return ["expected a wheel that build-horovod made, with built-for.json in it"]

    def differs(name: str, subject: str, by_major: bool = False) -> list[str]:
        wanted, present = built.get(name, "none"), here.get(name, "none")
        is_same = wanted.split(".")[0] == present.split(".")[0] if by_major else wanted == present
        return [] if is_same else [f"built for {subject}{wanted}, here is {present}"]

    reasons = [] if built.get("abi") == here["abi"] else [f"built for Python {built.get('python')}, here is {here['python']}"]
    for framework in ("torch", "tensorflow"):
        if framework in here:
            reasons += differs(framework, "" if framework in built else f"{framework}: ")
    # A machine without mpirun, such as one where srun starts the ranks, may have MPI's library all the same.
    if here["mpi"] != "none":
        reasons += differs("mpi", "", by_major=True)
    reasons += differs("cuda", "CUDA: ", by_major=True)
    libc, libc_here = built.get("libc", ""), here.get("libc", "")
    if libc and libc_here and is_older(libc_here, libc):
        reasons.append(f"built for {libc} or newer, here is {libc_here}")
    absent = set(built.get("processor", "").split()) - set(here.get("processor", "").split())
    if absent and here.get("processor"):
        reasons.append(f"built for a processor with {' '.join(sorted(absent))}, which this one does not have")
    return reasons


def label(wheel: Path, versions: Mapping[str, str], wheel_dir: Path) -> Path:
    """Write a copy of the wheel into the folder, with a name and metadata that say what it fits.

    It is renamed into place, since another build may write or read it at the same time.

    Raises:
        OSError: such as a full disk.
    """
    with tempfile.TemporaryDirectory(prefix=".new-", dir=wheel_dir) as new:
        folder = Path(new)
        _wheel("unpack", "--dest", str(folder / "unpacked"), str(wheel))
        [root] = (folder / "unpacked").iterdir()
        [old] = root.glob("*.dist-info")
        version = f"{HOROVOD_VERSION}+{_local_version(versions)}"
        info = old.rename(root / f"horovod-{version}.dist-info")
        (info / BUILT_FOR).write_text(json.dumps(dict(versions), indent=4) + "\n")
        metadata = re.sub(r"(?m)^Version: .*$", f"Version: {version}", (info / "METADATA").read_text(), count=1)
        required = "".join(f"Requires-Dist: {line}\n" for line in _requirements(versions))
        head, separator, description = metadata.partition("\n\n")
        (info / "METADATA").write_text(f"{head}\n{required.rstrip()}{separator}{description}")
        _wheel("pack", "--dest-dir", str(folder), "--build-number", _build_number(versions), str(root))
        [packed] = folder.glob("*.whl")
        return packed.replace(wheel_dir / packed.name)


def _local_version(versions: Mapping[str, str]) -> str:
    """The frameworks and MPI as the local part of a version: torch2.13.0.cpu.tensorflow.cpu2.21.0.openmpi4.

    >>> _local_version({"torch": "torch 2.15.0+cu132", "tensorflow": "tensorflow_cpu 2.21.0", "mpi": "Open MPI 5.0.7"})
    'torch2.15.0.cu132.tensorflow.cpu2.21.0.openmpi5'
    """
    parts = [versions[name].replace(" ", "") for name in ("torch", "tensorflow") if name in versions]
    name, _, number = versions["mpi"].rpartition(" ")
    parts.append(f"{name}{number.split('.')[0]}".replace(" ", "").lower())
    return ".".join(word for word in re.split(r"[^a-z0-9]+", ".".join(parts).lower()) if word)


def _requirements(versions: Mapping[str, str]) -> list[str]:
    """What the wheel's metadata requires: the frameworks that it was built for. A local version, as of 2.13.0+cpu, stays out.

    >>> _requirements({"torch": "torch 2.13.0+cpu", "tensorflow": "tensorflow_cpu 2.21.0"})
    ['torch==2.13.0', 'tensorflow-cpu==2.21.0']
    """
    named = [versions[name].split()[:2] for name in ("torch", "tensorflow") if name in versions]
    return [f"{package.replace('_', '-')}=={version.split('+')[0]}" for package, version in named]


def _build_number(versions: Mapping[str, str]) -> str:
    """A digit, as the build number of a wheel has to begin with one, and a hash of the versions."""
    return "0" + hashlib.sha256(json.dumps(dict(versions), sort_keys=True).encode()).hexdigest()[:12]


def _wheel(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "wheel", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"python -m wheel {arguments[0]}: {done.stderr.strip().splitlines()[-1] if done.stderr else 'failed'}")


def _version(package: str) -> str:
    """The version of a framework with the package that provides it (tensorflow-cpu provides the module tensorflow)."""
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
