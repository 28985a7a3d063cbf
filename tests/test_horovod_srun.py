"""What plain srun's tasks tell Horovod: pure functions of SLURM_*, and the rendezvous on a real socket."""

import pytest

from hvdtrain.comm.horovod_srun import Step, address_of, find, gloo_environment, interface_towards, read_step, serve
from hvdtrain.errors import LaunchError

TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}


def test_the_third_of_2_and_1_tasks() -> None:
    step = read_step(TASK)
    assert step is not None
    assert step.hosts == ("gpu08", "gpu09")
    assert step.horovod == {
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": "gpu09",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def test_the_second_task_of_the_first_node_has_nobody_across() -> None:
    step = read_step({**TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert step is not None
    assert (step.horovod["HOROVOD_CROSS_RANK"], step.horovod["HOROVOD_CROSS_SIZE"]) == ("0", "1")
    assert step.horovod["HOROVOD_LOCAL_SIZE"] == "2"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**TASK, "PMIX_RANK": "2"},  # srun --mpi=pmix: MPI connects them
        {**TASK, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"},  # mpirun inside a step
        {**TASK, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "3"},  # horovodrun knows better
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
    ],
)
def test_who_is_connected_otherwise_or_alone_is_left_alone(environ: dict[str, str]) -> None:
    assert read_step(environ) is None
    assert gloo_environment(environ) == {}


def test_mpi_under_plain_srun_is_refused() -> None:
    with pytest.raises(
        LaunchError, match=r"HOROVOD_CONTROLLER: expected gloo under plain srun, got mpi \(for MPI: srun --mpi=pmix\)"
    ):
        read_step({**TASK, "HOROVOD_CONTROLLER": "mpi"})


@pytest.mark.parametrize("tasks", ["2", "2,2", "many", ""])
def test_contradictions_are_refused(tasks: str) -> None:
    with pytest.raises(LaunchError, match="expected SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE for 3 tasks"):
        read_step({**TASK, "SLURM_STEP_TASKS_PER_NODE": tasks})


def test_a_step_finds_its_own_rendezvous_and_no_other() -> None:
    one = Step("17.0", rank=0, local_rank=0, node=0, hosts=("localhost",), tasks=(2,))
    port = serve(one)
    assert find(one, "127.0.0.1") == port
    assert serve(one) != port  # that port is taken, as if by another program
    stranger = Step("18.0", rank=1, local_rank=1, node=0, hosts=("localhost",), tasks=(2,))
    assert not set(stranger.ports) & set(one.ports)
    with pytest.raises(LaunchError, match=r"expected task 0 on localhost \(127.0.0.1\) to answer .* got no answer for 0.2 s"):
        find(stranger, "127.0.0.1", patience=0.2)


def test_addresses_and_interfaces() -> None:
    assert address_of("localhost").startswith("127.")
    assert interface_towards("127.0.0.1") == "lo"
    with pytest.raises(LaunchError, match="expected a host name that can be resolved, got 'nowhere.invalid'"):
        address_of("nowhere.invalid")
