"""How this process was launched: launcher, rank and size, cores and threads. Only this module reads the environment.

Launcher variables come first, then Slurm's lists of nodes and tasks, then cores and threads, then access to the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process. Without a launcher: rank 0 of 1."""

    launcher: str | None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


# The launcher, then its variables for rank, size, local rank and local size. The first launcher whose rank and size are set is
# used: horovodrun may itself run mpirun, and torchrun may run under srun, so the innermost launcher stands first.
LAUNCHERS = (
    ("hvdtrain", "HVDTRAIN_RANK", "HVDTRAIN_SIZE", "HVDTRAIN_LOCAL_RANK", "HVDTRAIN_LOCAL_SIZE"),  # ngpu, dist_rank
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # The variables of a job step: a plain `python` in an sbatch script has SLURM_NTASKS as well, but is a single process.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def launch() -> Launch:
    """How this process was launched."""
    return detect(os.environ)


def detect(environ: Mapping[str, str]) -> Launch:
    """Read the launcher's variables.

    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    Launch(launcher='mpirun', rank=1, size=2, local_rank=1, local_size=1)
    >>> detect({})
    Launch(launcher=None, rank=0, size=1, local_rank=0, local_size=1)
    """
    for launcher, rank, size, local_rank, local_size in LAUNCHERS:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            return Launch(
                launcher,
                int(environ[rank]),
                int(environ[size]),
                _int_or(environ.get(local_rank), 0),
                _tasks_on_this_node(environ) if launcher == "srun" else _int_or(environ.get(local_size), 1),
            )
    return Launch(None)


def variables(started: Launch) -> dict[str, str]:
    """The environment variables from which `detect` reads this launch, for a process that hvdtrain starts itself."""
    _, rank, size, local_rank, local_size = LAUNCHERS[0]
    return {
        rank: str(started.rank),
        size: str(started.size),
        local_rank: str(started.local_rank),
        local_size: str(started.local_size),
    }


def _int_or(text: str | None, default: int) -> int:
    """The number in a variable; the default if the variable is not set or no number."""
    return int(text) if text and text.isdigit() else default


def _tasks_on_this_node(environ: Mapping[str, str]) -> int:
    """The number of tasks of the step on this node; nodes may have different numbers."""
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _int_or(environ.get("SLURM_NODEID"), 0)
    return tasks[node] if node < len(tasks) else 1


def host_names(text: str) -> list[str]:
    """The hosts of SLURM_STEP_NODELIST and similar variables, as `scontrol show hostnames` lists them.

    >>> host_names("gpu[08-10,12],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    >>> host_names("rack[1-2]n[1,3]")
    ['rack1n1', 'rack1n3', 'rack2n1', 'rack2n3']
    """
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        heads = [""]
        for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            numbers = [number for piece in ranges.split(",") for number in _expanded(piece)] if ranges else [""]
            heads = [head + plain + number for head in heads for number in numbers]
        names += heads
    return names


def _expanded(piece: str) -> list[str]:
    """The numbers of a range: '08-10' is ['08', '09', '10'], and '7' is ['7']."""
    first, dash, last = piece.partition("-")
    if not dash:
        return [first]
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks of each node, from SLURM_STEP_TASKS_PER_NODE; [] if it cannot be parsed.

    >>> tasks_per_node("4(x2),1")
    [4, 4, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def cores() -> int:
    """The number of cores this process may use; if it is bound, the cores it is bound to."""
    return len(os.sched_getaffinity(0))


def is_bound() -> bool:
    """Whether this process is bound to some of the host's cores. mpirun binds its processes unless it gets --bind-to none."""
    return cores() < (os.cpu_count() or 1)


def threads_per_rank(environ: Mapping[str, str], local_size: int, cores: int, bound: bool) -> int:
    """The number of threads a rank computes with.

    This is OMP_NUM_THREADS if it is set, otherwise the number of cores the rank is bound to, or an equal share of the host's.

    >>> threads_per_rank({}, local_size=4, cores=16, bound=False), threads_per_rank({}, local_size=4, cores=1, bound=True)
    (4, 1)
    """
    return max(1, _int_or(environ.get("OMP_NUM_THREADS"), cores if bound else cores // max(1, local_size)))


def yield_when_idle(local_size: int, cores: int) -> None:
    """Make Open MPI yield the core while it waits, if the ranks have fewer cores than threads.

    Open MPI polls in a thread of its own, beside the thread that computes. If there are fewer than two cores per rank, a step
    takes up to four times as long without this. Call it before MPI is initialized; a value set by the user is kept.
    """
    if 2 * local_size > cores:
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


KEEPALIVE = "--mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 3"
"""Options with which mpirun detects a lost host within 12 s."""


def misses_lost_hosts(environ: Mapping[str, str]) -> bool:
    """Whether mpirun started this process without KEEPALIVE, so that it would wait for a lost host for hours.

    Slurm monitors its nodes itself.

    >>> misses_lost_hosts({"OMPI_MCA_orte_num_nodes": "2"})
    True
    >>> misses_lost_hosts({"OMPI_MCA_orte_num_nodes": "2", "OMPI_MCA_oob_tcp_keepalive_time": "5"})
    False
    """
    by_mpirun = "OMPI_MCA_orte_num_nodes" in environ and "SLURM_JOB_ID" not in environ
    return by_mpirun and "OMPI_MCA_oob_tcp_keepalive_time" not in environ


def environment() -> Mapping[str, str]:
    """This process's environment, for reading."""
    return os.environ


@contextmanager
def preserved_environment() -> Iterator[None]:
    """Around jobs in a program's process: what they `put` into the environment is gone afterwards, and the rest as before."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def put(variables: Mapping[str, str]) -> None:
    """Set environment variables that a library reads when it is initialized."""
    os.environ.update(variables)
