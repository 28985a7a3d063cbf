"""Who started this process: a pure function of the environment."""

import os

import pytest

from hvdtrain.comm.launchers import Place, detect
from hvdtrain.comm.this_process import place, threads_per_rank

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
HOROVODRUN = {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
HVDTRAIN = {"HVDTRAIN_RANK": "5", "HVDTRAIN_SIZE": "8", "HVDTRAIN_LOCAL_RANK": "1", "HVDTRAIN_LOCAL_SIZE": "4"}
SBATCH = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"}
SRUN = {
    **SBATCH,
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


@pytest.mark.parametrize(
    ("launcher", "environ"),
    [
        ("hvdtrain", HVDTRAIN),
        ("mpirun", MPIRUN),
        ("mpirun", MPICH),
        ("horovodrun", HOROVODRUN),
        ("torchrun", TORCHRUN),
        ("srun", SRUN),
    ],
)
def test_every_launcher_says_who_this_is(launcher: str, environ: dict[str, str]) -> None:
    assert detect(environ) == Place(launcher, rank=5, size=8, local_rank=1, local_size=4)


def test_alone() -> None:
    assert detect({}) == Place(None, rank=0, size=1, local_rank=0, local_size=1)
    assert detect({"PATH": "/bin", "LOCAL_RANK": "3"}) == Place(None)


def test_a_script_of_sbatch_without_srun_is_one_process() -> None:
    assert detect(SBATCH) == Place(None)


def test_the_innermost_launcher_decides() -> None:
    two = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert detect({**SBATCH, **two}) == Place("mpirun", rank=1, size=2)
    assert detect({**SRUN, **two}).launcher == "mpirun"
    assert detect({**SRUN, **TORCHRUN}).launcher == "torchrun"
    assert detect({**MPIRUN, **HOROVODRUN}).launcher == "horovodrun"
    assert detect({**MPIRUN, **SRUN, **HVDTRAIN}).launcher == "hvdtrain"


def test_values_that_are_no_numbers_are_not_believed() -> None:
    assert detect({"RANK": "", "WORLD_SIZE": "4"}) == Place(None)
    assert detect({"RANK": "1"}) == Place(None)
    assert detect({"RANK": "senior", "WORLD_SIZE": "4"}) == Place(None)
    assert detect({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "?"}) == Place("torchrun", rank=1, size=4)


def test_tasks_per_node_of_slurm_may_differ() -> None:
    assert detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,3"}).local_size == 4
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    assert detect(uneven).local_size == 2
    assert [detect({**uneven, "SLURM_NODEID": str(node)}).local_size for node in range(4)] == [2, 2, 2, 1]
    assert detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "?"}).local_size == 1


def test_launch_reads_this_processes_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI_", "HOROVOD_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert place() == detect(TORCHRUN)


def test_threads_of_a_rank() -> None:
    assert threads_per_rank({}, local_size=1, cores=8, bound=False) == 8
    assert threads_per_rank({}, local_size=3, cores=8, bound=False) == 2
    assert threads_per_rank({}, local_size=16, cores=8, bound=False) == 1
    assert threads_per_rank({}, local_size=4, cores=2, bound=True) == 2  # the cores are this rank's alone
    assert threads_per_rank({"OMP_NUM_THREADS": "3"}, local_size=2, cores=8, bound=False) == 3
    assert threads_per_rank({"OMP_NUM_THREADS": "0"}, local_size=1, cores=8, bound=False) == 1
    assert threads_per_rank({"OMP_NUM_THREADS": "many"}, local_size=2, cores=8, bound=False) == 4
