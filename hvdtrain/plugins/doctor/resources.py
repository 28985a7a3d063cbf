"""Shared memory, disk, memory, cores, GPUs and the limits of a process."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.data.files import size_text
from hvdtrain.plugins.doctor.findings import Finding, ok, problem, warning
from hvdtrain.plugins.doctor.packages import output
from hvdtrain.runtime.memory import host_memory

MEGABYTE, GIGABYTE = 1 << 20, 1 << 30


SHARED_PER_RANK = 4 * MEGABYTE
"""The memory that Open MPI allocates in /dev/shm for each rank. NCCL allocates 10 to 30 MB for each connection."""

OF_A_CONTAINER = 64 * MEGABYTE
"""The shared memory of a Docker container without --shm-size."""


def check_shared_memory(ranks: int, gpus: int, folder: Path = Path("/dev/shm")) -> Finding:
    """Whether the ranks of a host can communicate through shared memory.

    Args:
        ranks: of this host.
        gpus: of this host; NCCL needs shared memory for each.
    """
    about = "shared memory"
    fix = "a container: --shm-size=1g (or --ipc=host); else as root: mount -o remount,size=8G /dev/shm"
    try:
        space = shutil.disk_usage(folder)
    except OSError as error:
        return problem(about, f"expected {folder}, got: {error}", fix)
    if not os.access(folder, os.W_OK):
        return problem(about, f"expected to write to {folder}, got: permission denied", f"chmod 1777 {folder}")
    free = f"{size_text(space.free)} of {size_text(space.total)} free in {folder}"
    needed = max(ranks, gpus, 1) * SHARED_PER_RANK
    if space.free < needed:
        text = f"expected {size_text(needed)} for Open MPI alone, got {free}"
        return problem(about, text, f"{fix}; or remove what earlier jobs left there")
    if space.total <= OF_A_CONTAINER or space.free < OF_A_CONTAINER:
        return warning(about, f"{free}: NCCL and workers that read data need more", fix)
    return ok(about, free)


def check_disk(folder: Path, about: str, needed: int = GIGABYTE) -> Finding:
    """Whether files can be written under a folder, which need not exist.

    Args:
        about: what will be written.
        needed: bytes that should be free.
    """
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".hvdtrain-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        space = shutil.disk_usage(existing)
    except OSError as error:
        fix = "free some space, or choose another folder" if error.errno == 28 else "choose a folder that you may write to"
        return problem(about, f"expected to write to {existing}, got: {error.strerror}", fix)
    text = f"{size_text(space.free)} of {size_text(space.total)} free in {existing}"
    if space.free < needed:
        return warning(about, f"expected at least {size_text(needed)}, got {text}", "free some space, or choose another folder")
    return ok(about, text)


def check_memory() -> list[Finding]:
    """The available memory of the host, or of its container."""
    available = host_memory()
    if available is None:
        return []
    text = f"{size_text(available)} available"
    if available < GIGABYTE:
        fix = "end other programs on the host, or request more memory"
        return [warning("memory", f"expected at least 1 GB, got {text}", fix)]
    return [ok("memory", text)]


def check_limits(files: int, gpus: int, infiniband: bool) -> list[Finding]:
    """The limits of a process (`ulimit -a`).

    Args:
        files: the number of files of the config's datasets.
        gpus: of this host.
    """
    findings = []
    open_files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1024 if files < 512 else 2 * files + 512
    if resource.RLIM_INFINITY != open_files < needed:
        text = f"expected {needed} open files or more, got {open_files}: sockets of many ranks and HDF files count"
        fix = f"ulimit -n {needed}" if hard == resource.RLIM_INFINITY or hard >= needed else "LimitNOFILE of your cluster"
        findings.append(warning("open files", text, fix))
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if memory != resource.RLIM_INFINITY:
        text = f"ulimit -v is {size_text(memory)}: mapped HDF files count, and CUDA reserves many times the GPU's memory"
        fix = "ulimit -v unlimited; SGE: request a larger h_vmem"
        findings.append((problem if gpus else warning)("address space", text, fix))
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if resource.RLIM_INFINITY != processes < 1024:
        findings.append(warning("threads", f"ulimit -u allows {processes} processes and threads", "ulimit -u 4096"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if infiniband and locked != resource.RLIM_INFINITY:
        text = f"expected no limit of locked memory for InfiniBand, got {size_text(locked)}"
        findings.append(problem("locked memory", text, "ulimit -l unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK"))
    return findings or [ok("limits", f"{_count(open_files)} open files, {_count(processes)} processes, address space unlimited")]


def _count(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


TO_UNBIND = "mpirun --bind-to none -map-by slot; srun --cpu-bind=none, and -c for cores per rank"


def check_cores(environ: Mapping[str, str], cores: Sequence[int], host_cores: int, allowed: float | None) -> list[Finding]:
    """The cores of this process.

    Args:
        cores: the numbers of the cores that this process may use.
        host_cores: the number of cores of the host.
        allowed: a container's quota.

    >>> check_cores({}, [3], 16, None)[0].level, check_cores({}, range(16), 16, 2.0)[0].level
    ('warning', 'warning')
    """
    findings = []
    if len(cores) == 1 < host_cores:
        text = f"bound to core {cores[0]} of {host_cores}: all threads of a rank, also those that read data, share this core"
        findings.append(warning("cores", text, TO_UNBIND))
    if allowed is not None and allowed < len(cores):
        text = f"{len(cores)} cores are visible, but the container's quota is {allowed:g}: too many threads are started"
        findings.append(warning("cores", text, f"export OMP_NUM_THREADS={max(1, int(allowed))}, or raise the container's quota"))
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads and not threads.split(",")[0].isdigit():
        findings.append(
            problem("OMP_NUM_THREADS", f"expected a number, got {threads!r}", "export OMP_NUM_THREADS=1, for example")
        )
    return findings or [ok("cores", f"{len(cores)} of {host_cores}" + (f", OMP_NUM_THREADS={threads}" if threads else ""))]


def check_shared_cores(ranks: Sequence[tuple[str, Sequence[int]]], host_cores: int, threads: int | None) -> list[Finding]:
    """Whether the ranks of a host compete for cores.

    Args:
        ranks: a name for each rank of the host, and the cores that it may use.
        threads: OMP_NUM_THREADS.

    >>> [finding.text for finding in check_shared_cores([("rank 0", [0]), ("rank 1", [0])], 8, None)]
    ['rank 0, rank 1 share 1 core (0) of 8']
    >>> check_shared_cores([("rank 0", range(8)), ("rank 1", range(8))], 8, 8)[0].level
    'warning'
    """
    sets = [frozenset(cores) for _, cores in ranks]
    together = frozenset().union(*sets)
    names = ", ".join(name for name, _ in ranks)
    if len(ranks) > 1 and len(together) < min(len(ranks), host_cores):
        numbers = ", ".join(map(str, sorted(together)))
        text = f"{names} share {len(together)} core{'s' if len(together) > 1 else ''} ({numbers}) of {host_cores}"
        return [problem("cores", text, TO_UNBIND)]
    if len(ranks) > len(together):
        text = f"{len(ranks)} ranks on {len(together)} cores"
        return [warning("cores", text, "start at most as many ranks as cores; more ranks run, but take turns")]
    if threads is not None and threads * len(ranks) > len(together):
        text = f"{len(ranks)} ranks with OMP_NUM_THREADS={threads} on {len(together)} cores"
        number = len(together) // len(ranks)
        fix = f"export OMP_NUM_THREADS={number}, or leave it unset: hvdtrain divides the cores among the ranks"
        return [warning("cores", text, fix)]
    return []


def container_quota() -> float | None:
    """The quota of this process's control group."""
    try:
        return quota(Path("/sys/fs/cgroup/cpu.max").read_text())
    except (OSError, ValueError):
        return None


def quota(cpu_max: str) -> float | None:
    """The number of cores that a container may use, from the contents of cpu.max; None: all.

    >>> quota("150000 100000"), quota("max 100000")
    (1.5, None)
    """
    limit, period, *_ = [*cpu_max.split(), "max", "100000"]
    return None if limit == "max" else int(limit) / int(period)


QUERY = [
    "nvidia-smi",
    "--query-gpu=index,name,driver_version,memory.total,memory.used,compute_mode",
    "--format=csv,noheader,nounits",
]


@dataclass(frozen=True)
class Gpu:
    """A line of nvidia-smi. Memory is in MB."""

    index: int
    name: str
    driver: str
    total: int
    used: int
    mode: str


def check_gpus(environ: Mapping[str, str], ranks: int) -> tuple[list[Gpu], list[Finding]]:
    """The GPUs that nvidia-smi lists, and their problems.

    Args:
        ranks: of this host.
    """
    if not shutil.which("nvidia-smi"):
        if Path("/proc/driver/nvidia").exists():
            return [], [warning("GPU", "the driver is loaded, but nvidia-smi is not in PATH", "install the driver's utilities")]
        return [], [ok("GPU", "none: training runs on the CPU")]
    status, said = output(QUERY, seconds=30)
    if status != 0:
        text = f"nvidia-smi answers: {said.splitlines()[0] if said else 'nothing'}"
        return [], [problem("GPU", text, "reinstall the driver, or reboot")]
    gpus = parse_gpus(said)
    names = ", ".join(f"{sum(gpu.name == name for gpu in gpus)} x {name}" for name in dict.fromkeys(gpu.name for gpu in gpus))
    findings = [ok("GPU", f"{names}, driver {gpus[0].driver}" if gpus else "none")]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpus) if visible is None else len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if gpus and not count:
        findings.append(warning("GPU", "CUDA_VISIBLE_DEVICES hides all of them", "unset CUDA_VISIBLE_DEVICES"))
    elif ranks > count > 0:
        text = f"{ranks} ranks on this host share {count} GPU{'s' if count > 1 else ''}; NCCL refuses that"
        findings.append(problem("GPU", text, f"start {count} ranks on this host"))
    for gpu in gpus:
        if gpu.used > gpu.total // 2:
            text = f"GPU {gpu.index}: other programs use {gpu.used} of {gpu.total} MB"
            findings.append(warning("GPU", text, "nvidia-smi lists them; choose other GPUs with CUDA_VISIBLE_DEVICES"))
        if gpu.mode == "Prohibited":
            text = f"GPU {gpu.index} is in compute mode Prohibited"
            findings.append(problem("GPU", text, f"nvidia-smi -i {gpu.index} -c DEFAULT"))
    return gpus, findings


def parse_gpus(text: str) -> list[Gpu]:
    """The answer to QUERY.

    >>> parse_gpus("0, NVIDIA H100, 535.54, 81559, 3, Default")
    [Gpu(index=0, name='NVIDIA H100', driver='535.54', total=81559, used=3, mode='Default')]
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        Gpu(int(row[0]), row[1], row[2], _number(row[3]), _number(row[4]), row[5])
        for row in rows
        if len(row) == 6 and row[0].isdigit()
    ]


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
