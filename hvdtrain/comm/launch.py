"""Who started this process, and as which of how many. The only reader of the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process. Alone: rank 0 of 1."""

    launcher: str | None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


# Launcher, then its names for rank, size, local rank and local size. The first whose rank and size are set decides:
# horovodrun may itself run mpirun, and torchrun may run under srun, so the innermost launcher stands first.
LAUNCHERS = (
    ("hvdtrain", "HVDTRAIN_RANK", "HVDTRAIN_SIZE", "HVDTRAIN_LOCAL_RANK", "HVDTRAIN_LOCAL_SIZE"),  # ngpu, dist_rank
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Inside a job step only: a plain `python` in an sbatch script knows SLURM_NTASKS as well, and is one process.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


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
                _number(environ.get(local_rank), 0),
                _tasks_here(environ) if launcher == "srun" else _number(environ.get(local_size), 1),
            )
    return Launch(None)


def _tasks_here(environ: Mapping[str, str]) -> int:
    """How many tasks of the step are on this node: nodes may have different numbers."""
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ.get("SLURM_NODEID"), 0)
    return tasks[node] if node < len(tasks) else 1


def variables(started: Launch) -> dict[str, str]:
    """What `detect` reads as such a launch by hvdtrain itself: for the environment of a process that is to be started."""
    _, rank, size, local_rank, local_size = LAUNCHERS[0]
    return {
        rank: str(started.rank),
        size: str(started.size),
        local_rank: str(started.local_rank),
        local_size: str(started.local_size),
    }


def launch() -> Launch:
    """How this process was started."""
    return detect(os.environ)


def cores() -> int:
    """How many cores this process may use: those it is bound to, where it is."""
    return len(os.sched_getaffinity(0))


def is_bound() -> bool:
    """Whether this process is bound to some of the host's cores, as mpirun does unless it is told --bind-to none."""
    return cores() < (os.cpu_count() or 1)


def threads_per_rank(environ: Mapping[str, str], local_size: int, cores: int, bound: bool) -> int:
    """How many threads a rank computes with: OMP_NUM_THREADS where it is set; else the cores it is bound to, or an equal
    share of the host's.

    >>> threads_per_rank({}, local_size=4, cores=16, bound=False), threads_per_rank({}, local_size=4, cores=1, bound=True)
    (4, 1)
    """
    return max(1, _number(environ.get("OMP_NUM_THREADS"), cores if bound else cores // max(1, local_size)))


def yield_when_idle(local_size: int, cores: int) -> None:
    """Let Open MPI give up the core while it waits, where the ranks would otherwise take it from each other.

    Open MPI waits by asking again and again, on a thread of its own beside the one that computes. Where two threads a
    rank are more than the cores, a step takes up to four times as long. To be called before MPI starts; a user's own
    setting stands.
    """
    if 2 * local_size > cores:
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


KEEPALIVE = "--mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 3"
"""With which mpirun finds out within 12 s that a host is lost."""


def misses_lost_hosts(environ: Mapping[str, str]) -> bool:
    """Whether mpirun started this process and would wait for a host that is lost: without KEEPALIVE, for hours.

    Slurm watches its nodes itself.

    >>> misses_lost_hosts({"OMPI_MCA_orte_num_nodes": "2"})
    True
    >>> misses_lost_hosts({"OMPI_MCA_orte_num_nodes": "2", "OMPI_MCA_oob_tcp_keepalive_time": "5"})
    False
    """
    by_mpirun = "OMPI_MCA_orte_num_nodes" in environ and "SLURM_JOB_ID" not in environ
    return by_mpirun and "OMPI_MCA_oob_tcp_keepalive_time" not in environ


def environment() -> Mapping[str, str]:
    """This process's environment, to read."""
    return os.environ


def put(variables: Mapping[str, str]) -> None:
    """Set variables for a library that reads the environment when it starts."""
    os.environ.update(variables)


def _number(text: str | None, default: int) -> int:
    """A variable's number, or the default."""
    return int(text) if text and text.isdigit() else default


def host_names(text: str) -> list[str]:
    """The hosts of SLURM_STEP_NODELIST and its like, as `scontrol show hostnames` lists them.

    >>> host_names("gpu[08-10,12],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    >>> host_names("rack[1-2]n[1,3]")
    ['rack1n1', 'rack1n3', 'rack2n1', 'rack2n3']
    """
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        heads = [""]
        for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            numbers = [number for piece in ranges.split(",") for number in _numbers(piece)] if ranges else [""]
            heads = [head + plain + number for head in heads for number in numbers]
        names += heads
    return names


def tasks_per_node(text: str) -> list[int]:
    """How many tasks each node has, from SLURM_STEP_TASKS_PER_NODE; [] if it cannot be read.

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


def _numbers(piece: str) -> list[str]:
    """'08-10': ['08', '09', '10']; a single number is itself."""
    first, dash, last = piece.partition("-")
    if not dash:
        return [first]
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
