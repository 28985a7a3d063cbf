r"""Check that the processes of a job can communicate: every rank sends a greeting over MPI and over Horovod.

    mpirun -np 2 --bind-to none python demos/demo_horovod_mpi.py
    mpirun -np 4 -H host1:2,host2:2 --bind-to none -x PATH \
        --mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 3 \
        python demos/demo_horovod_mpi.py
    horovodrun -np 4 -H host1:2,host2:2 python demos/demo_horovod_mpi.py
    srun -N2 -n4 --mpi=pmix python demos/demo_horovod_mpi.py
    srun -N2 -n4 python demos/demo_horovod_mpi.py        # without MPI: Horovod over Gloo

    --framework tensorflow    Horovod's binding to use; default: torch

The exit status is 0 if all ranks took part, 1 if an all-reduce gave a wrong result, and 2 for errors that hvdtrain reports.
"""

import argparse
import importlib
import importlib.metadata
import os
import platform
import socket
import sys
import time

from hvdtrain.comm import this_process
from hvdtrain.comm.base import all_reduce
from hvdtrain.comm.mpi import world
from hvdtrain.comm.this_process import cores
from hvdtrain.errors import HvdtrainError
from hvdtrain.plugins.horovod.communicator import open_horovod

# The variables that affect how the processes connect and how fast they communicate. Launchers set many more.
RELEVANT_VARIABLES = (
    "CUDA_VISIBLE_DEVICES HOROVOD_CONTROLLER HOROVOD_CPU_OPERATIONS HOROVOD_GLOO_IFACE HOROVOD_TIMELINE LD_LIBRARY_PATH "
    "MASTER_ADDR MASTER_PORT NCCL_DEBUG NCCL_IB_DISABLE NCCL_SOCKET_IFNAME OMP_NUM_THREADS OMPI_MCA_btl "
    "OMPI_MCA_btl_tcp_if_include OMPI_MCA_mpi_yield_when_idle OMPI_MCA_pml SLURM_JOB_ID SLURM_MPI_TYPE "
    "SLURM_STEP_NODELIST SLURM_STEP_TASKS_PER_NODE"
).split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch")
    framework = parser.parse_args().framework
    place = this_process.place()
    try:
        say(place.rank, f"{place.launcher or 'no launcher'} started {place.size} process{'es' if place.size > 1 else ''}")
        versions = f"Python {platform.python_version()}, {version(framework)}, {version('horovod')}, {version('mpi4py')}"
        say(place.rank, versions + built_with(framework))
        hello_over_mpi(place.rank)
        return hello_over_horovod(framework)
    except HvdtrainError as error:
        print(f"rank {place.rank}: {error}", file=sys.stderr, flush=True)
        return 2


def hello_over_mpi(rank: int) -> None:
    """Gather a greeting from every rank with mpi4py, if MPI connects the processes."""
    if this_process.place().launcher == "srun" and "PMIX_RANK" not in os.environ:
        say(rank, "MPI: skipped, as srun connects the processes only with --mpi=pmix")
        return
    if os.environ.get("HOROVOD_CONTROLLER") == "gloo":
        say(rank, "MPI: skipped, as HOROVOD_CONTROLLER=gloo")
        return
    place = this_process.place()
    if place.size == 1:
        say(rank, "MPI: this is the only process")
        return
    ranks = world(place)
    from mpi4py import MPI

    say(ranks.rank, f"MPI: {MPI.Get_library_version().split(',')[0]}")
    hello = f"hello over MPI from rank {ranks.rank} of {ranks.size} on {socket.gethostname()}"
    for greeting in ranks.allgather(hello):
        say(ranks.rank, greeting)


def hello_over_horovod(framework: str) -> int:
    """Gather greetings with Horovod and check an all-reduced sum that needs all ranks. Returns the exit status."""
    comm = open_horovod(framework)
    here = f"rank {comm.rank} of {comm.size}, local rank {comm.local_rank} of {comm.local_size}"
    where = f"{socket.gethostname()} ({address()})"
    settings = {name: os.environ[name] for name in RELEVANT_VARIABLES if name in os.environ}
    lines = comm.gather((f"{here} on {where}, process {os.getpid()}, {cores()} cores", settings), name="greetings")
    for line, _ in lines:
        say(comm.rank, f"hello over Horovod from {line}")
    for name in sorted({name for _, theirs in lines for name in theirs}):
        values = {rank: theirs.get(name, "not set") for rank, (_, theirs) in enumerate(lines)}
        same = len(set(values.values())) == 1
        say(comm.rank, f"  {name}: {values[0] if same else ', '.join(f'rank {rank}: {text}' for rank, text in values.items())}")
    total, seconds = total_of_ranks(comm, framework)
    expected = comm.size * (comm.size + 1) // 2
    say(comm.rank, f"sum of 1 to {comm.size}: {total}, expected {expected}; an all-reduce took {1000 * seconds:.2f} ms")
    comm.close()
    return 0 if total == expected else 1


def address() -> str:
    """The address that this host's name resolves to on the host. Debian's 127.0.1.1 is of no use to other hosts."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"a name without an address: {error}"


def total_of_ranks(comm, framework: str, repetitions: int = 20) -> tuple[int, float]:
    """The sum of rank + 1 over all ranks, and the shortest time of an all-reduce of one number in seconds."""
    module = importlib.import_module(framework)
    times = []
    for number in range(repetitions):
        one = module.ones(1) if framework == "torch" else module.ones([1])
        begin = time.perf_counter()
        reduced = all_reduce(comm, [one * (comm.rank + 1)], "sum", name=f"demo.{number % 2}")
        times.append(time.perf_counter() - begin)
    return int(reduced[0][0]), min(times)


def built_with(framework: str) -> str:
    """The communication libraries that Horovod was built with."""
    binding = importlib.import_module(f"horovod.{framework}")
    parts = {"MPI": binding.mpi_built(), "Gloo": binding.gloo_built(), "NCCL": binding.nccl_built()}
    return f" (with {', '.join(name for name, there in parts.items() if there)})"


def version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return (
            f"{package} is missing" if package != "tensorflow" else f"tensorflow {importlib.import_module(package).__version__}"
        )


def say(rank: int, line: str) -> None:
    """Print a line on rank 0."""
    if rank == 0:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
