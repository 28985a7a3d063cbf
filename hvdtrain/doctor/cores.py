"""Which cores the ranks compute on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.doctor.findings import Finding, ok, problem, warning

TO_UNBIND = "mpirun --bind-to none -map-by slot; srun --cpu-bind=none, and -c for cores per rank"


def quota(cpu_max: str) -> float | None:
    """How many cores a container may use, from the contents of cpu.max; None: as many as there are.

    >>> quota("150000 100000"), quota("max 100000")
    (1.5, None)
    """
    limit, period, *_ = [*cpu_max.split(), "max", "100000"]
    return None if limit == "max" else int(limit) / int(period)


def check_cores(environ: Mapping[str, str], own: Sequence[int], host_cores: int, allowed: float | None) -> list[Finding]:
    """The cores of this process.

    Args:
        own: the numbers of the cores that this process may use.
        host_cores: how many the host has.
        allowed: a container's quota.

    >>> check_cores({}, [3], 16, None)[0].level, check_cores({}, range(16), 16, 2.0)[0].level
    ('warning', 'warning')
    """
    findings = []
    if len(own) == 1 < host_cores:
        text = f"bound to core {own[0]} of {host_cores}: a rank's threads take turns on it, the reading of data among them"
        findings.append(warning("cores", text, TO_UNBIND))
    if allowed is not None and allowed < len(own):
        text = f"{len(own)} cores are seen, but a quota allows the work of {allowed:g}: too many threads are started"
        findings.append(warning("cores", text, f"export OMP_NUM_THREADS={max(1, int(allowed))}, or raise the container's quota"))
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads and not threads.split(",")[0].isdigit():
        findings.append(
            problem("OMP_NUM_THREADS", f"expected a number, got {threads!r}", "export OMP_NUM_THREADS=1, for example")
        )
    return findings or [ok("cores", f"{len(own)} of {host_cores}" + (f", OMP_NUM_THREADS={threads}" if threads else ""))]


def check_shared_cores(ranks: Sequence[tuple[str, Sequence[int]]], host_cores: int, threads: int | None) -> list[Finding]:
    """Whether the ranks of one host stand in each other's way.

    Args:
        ranks: of every rank of the host, what to call it and the cores it may use.
        threads: OMP_NUM_THREADS.

    >>> [each.text for each in check_shared_cores([("rank 0", [0]), ("rank 1", [0])], 8, None)]
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
        return [
            warning(
                "cores", text, "as many ranks as cores, or fewer; Open MPI's busy waiting is off then, but they wait in turns"
            )
        ]
    if threads is not None and threads * len(ranks) > len(together):
        text = f"{len(ranks)} ranks with OMP_NUM_THREADS={threads} on {len(together)} cores"
        fix = f"export OMP_NUM_THREADS={len(together) // len(ranks)}, or leave it unset: hvdtrain divides the cores by itself"
        return [warning("cores", text, fix)]
    return []


def container_quota() -> float | None:
    """The quota of this process's control group."""
    file = Path("/sys/fs/cgroup/cpu.max")
    try:
        return quota(file.read_text())
    except (OSError, ValueError):
        return None
