"""This process: its launcher, rank and size, cores and threads. Only this module reads the environment.

In this order: the launcher, cores and threads, access to the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hvdtrain.comm.launchers import Launcher, Place, launcher_of, number_in


def launcher() -> Launcher:
    """The launcher of this process."""
    return launcher_of(os.environ)


def place() -> Place:
    """How this process was launched."""
    return launcher().place


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
    return max(1, number_in(environ, "OMP_NUM_THREADS", cores if bound else cores // max(1, local_size)))


KEEPALIVE = "--mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 3"
"""Options with which mpirun detects a lost host within 12 s."""


def misses_lost_hosts(environ: Mapping[str, str]) -> bool:
    """Whether mpirun started this process without KEEPALIVE, so that it would wait for hours for a lost host.

    Under Slurm that cannot happen, as it monitors its nodes.

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
    """Restore the environment at the end of a job in a program's process."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def take(name: str) -> str | None:
    """The value of a variable that no child process is to inherit; None: it is not set."""
    return os.environ.pop(name, None)


def put(variables: Mapping[str, str]) -> None:
    """Set environment variables that a library reads when it is initialized."""
    os.environ.update(variables)
