"""Shared memory, disk, memory and the limits of a process."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

from hvdtrain.doctor.findings import Finding, ok, problem, warning

MEGABYTE, GIGABYTE = 1 << 20, 1 << 30

SHARED_PER_RANK = 4 * MEGABYTE
"""What Open MPI asks for in /dev/shm for each rank. NCCL takes some 10 to 30 MB for each of its connections."""

OF_A_CONTAINER = 64 * MEGABYTE
"""What Docker gives a container unless it is told otherwise."""


def check_shared_memory(ranks: int, gpus: int, folder: Path = Path("/dev/shm")) -> Finding:
    """Whether ranks of one host can talk through memory.

    Args:
        ranks: of this host.
        gpus: of this host; NCCL needs more.
    """
    about = "shared memory"
    fix = "a container: --shm-size=1g (or --ipc=host); else as root: mount -o remount,size=8G /dev/shm"
    try:
        space = shutil.disk_usage(folder)
    except OSError as error:
        return problem(about, f"expected {folder}, got: {error}", fix)
    if not os.access(folder, os.W_OK):
        return problem(about, f"expected to write to {folder}, got: permission denied", f"chmod 1777 {folder}")
    free = f"{words(space.free)} of {words(space.total)} free in {folder}"
    needed = max(ranks, gpus, 1) * SHARED_PER_RANK
    if space.free < needed:
        return problem(about, f"expected {words(needed)} for Open MPI alone, got {free}", f"{fix}; or remove what is left in it")
    if space.total <= OF_A_CONTAINER or space.free < OF_A_CONTAINER:
        return warning(about, f"{free}: NCCL and workers that read data need more", fix)
    return ok(about, free)


def check_disk(folder: Path, about: str, needed: int = GIGABYTE) -> Finding:
    """Whether files can be written under a folder, which need not exist yet.

    Args:
        about: what is going to be written.
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
        hint = "make room, or choose another place" if error.errno == 28 else "choose a folder that you may write to"
        return problem(about, f"expected to write to {existing}, got: {error.strerror}", hint)
    text = f"{words(space.free)} of {words(space.total)} free in {existing}"
    if space.free < needed:
        return warning(about, f"expected at least {words(needed)}, got {text}", "make room, or choose another place")
    return ok(about, text)


def check_limits(files: int, gpus: int, infiniband: bool) -> list[Finding]:
    """The limits of a process (`ulimit -a`).

    Args:
        files: how many files the config's datasets consist of.
        gpus: of this host.
    """
    findings = []
    open_files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1024 if files < 512 else 2 * files + 512
    if resource.RLIM_INFINITY != open_files < needed:
        text = f"expected {needed} open files or more, got {open_files}: sockets of many ranks and HDF files count"
        more = f"ulimit -n {needed}" if hard == resource.RLIM_INFINITY or hard >= needed else "LimitNOFILE of your cluster"
        findings.append(warning("open files", text, more))
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if memory != resource.RLIM_INFINITY:
        text = f"ulimit -v is {words(memory)}: mapped HDF files count, and CUDA reserves many times the GPU's memory"
        fix = "ulimit -v unlimited; SGE: ask for a larger h_vmem"
        findings.append((problem if gpus else warning)("address space", text, fix))
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if resource.RLIM_INFINITY != processes < 1024:
        findings.append(warning("threads", f"ulimit -u allows {processes} processes and threads", "ulimit -u 4096"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if infiniband and locked != resource.RLIM_INFINITY:
        text = f"expected no limit of locked memory for InfiniBand, got {words(locked)}"
        findings.append(problem("locked memory", text, "ulimit -l unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK"))
    return findings or [ok("limits", f"{_count(open_files)} open files, {_count(processes)} processes, address space unlimited")]


def check_memory() -> list[Finding]:
    """The host's memory, or what its container leaves of it."""
    try:
        numbers = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
        available, total = (int(numbers[f"Mem{name}:"]) * 1024 for name in ("Available", "Total"))
    except (OSError, ValueError, KeyError):
        return []
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    if allowed.isdigit() and int(allowed) < total:
        total = int(allowed)
        available = min(available, total)
    text = f"{words(available)} of {words(total)} available"
    if available < GIGABYTE:
        return [warning("memory", f"expected at least 1 GB, got {text}", "end what else runs on the host, or ask for more")]
    return [ok("memory", text)]


def words(size: float) -> str:
    """A number of bytes, for people.

    >>> words(64 * MEGABYTE), words(1.5 * GIGABYTE), words(512)
    ('64 MB', '1.5 GB', '0.5 KB')
    """
    if size < MEGABYTE:
        return f"{size / 1024:.1f} KB"
    return f"{size / GIGABYTE:.1f} GB" if size >= GIGABYTE else f"{size / MEGABYTE:.0f} MB"


def _count(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)
