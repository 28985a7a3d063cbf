"""What plain srun's tasks tell Horovod: pure functions of SLURM_*, and the rendezvous on a real socket.

The whole is tested under a real srun and mpirun in tests/cluster.
"""

from collections.abc import Iterator

import pytest
from horovod.runner.http.http_server import RendezvousHTTPServer

from hvdtrain.errors import LaunchError
from hvdtrain.plugins.horovod.gloo import Job, address_of, find, gloo_environment, interface_towards, read_job, serve

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
    job = read_job(TASK)
    assert job is not None
    assert job.hosts == ("gpu08", "gpu09")
    assert job.horovod == {
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


def test_the_second_task_of_the_first_node_has_no_cross_rank() -> None:
    job = read_job({**TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert job is not None
    assert (job.horovod["HOROVOD_CROSS_RANK"], job.horovod["HOROVOD_CROSS_SIZE"]) == ("0", "1")
    assert job.horovod["HOROVOD_LOCAL_SIZE"] == "2"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**TASK, "PMIX_RANK": "2"},  # srun --mpi=pmix: MPI connects them
        {**TASK, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"},  # mpirun inside a step
        {**TASK, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3", "HOROVOD_CONTROLLER": "mpi"},  # horovodrun --mpi
        {**TASK, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "3", "HOROVOD_CONTROLLER": "gloo"},  # horovodrun knows better
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
    ],
)
def test_who_is_connected_otherwise_or_alone_is_left_alone(environ: dict[str, str]) -> None:
    assert read_job(environ) is None
    assert gloo_environment(environ) == {}


@pytest.mark.parametrize("name", ["HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"])
def test_gloo_can_be_asked_for_where_there_is_mpi(name: str) -> None:
    job = read_job({**TASK, "PMIX_RANK": "2", name: "gloo"})
    assert job is not None
    assert job.horovod["HOROVOD_CONTROLLER"] == job.horovod["HOROVOD_CPU_OPERATIONS"] == "gloo"


def test_mpi_under_plain_srun_is_refused() -> None:
    with pytest.raises(
        LaunchError, match=r"HOROVOD_CONTROLLER: expected gloo under plain srun, got mpi \(for MPI: srun --mpi=pmix\)"
    ):
        read_job({**TASK, "HOROVOD_CONTROLLER": "mpi"})


@pytest.mark.parametrize("tasks", ["2", "2,2", "many", ""])
def test_contradictions_are_refused(tasks: str) -> None:
    with pytest.raises(LaunchError, match="expected SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE for 3 tasks"):
        read_job({**TASK, "SLURM_STEP_TASKS_PER_NODE": tasks})


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the servers of a test, which live as long as the process of a training."""
    started: list[RendezvousHTTPServer] = []
    forever = RendezvousHTTPServer.serve_forever

    def noted(server: RendezvousHTTPServer) -> None:
        started.append(server)
        forever(server, 0.01)

    monkeypatch.setattr(RendezvousHTTPServer, "serve_forever", noted)
    yield
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.usefixtures("servers")
def test_a_job_finds_its_own_rendezvous_and_no_other() -> None:
    one = Job("17.0", rank=0, local_rank=0, node=0, hosts=("localhost",), tasks=(2,))
    port = serve(one)
    assert find(one, "127.0.0.1") == port
    assert serve(one) != port  # that port is taken, as if by another program
    stranger = Job("18.0", rank=1, local_rank=1, node=0, hosts=("localhost",), tasks=(2,))
    assert not set(stranger.ports) & set(one.ports)
    with pytest.raises(
        LaunchError, match=r"expected rank 0 on localhost \(127.0.0.1\) to answer on a port from .* got no answer for 0.2 s"
    ):
        find(stranger, "127.0.0.1", timeout=0.2)


def test_addresses_and_interfaces() -> None:
    assert address_of("localhost").startswith("127.")
    assert interface_towards("127.0.0.1") == "lo"
    with pytest.raises(LaunchError, match="expected a host name that can be resolved, got 'nowhere.invalid'"):
        address_of("nowhere.invalid")
