"""Where processes meet: a pure function of the environment and the keys."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.distributed import HashStore

from hvdtrain.comm import torch_rendezvous
from hvdtrain.comm.launchers import Place, detect
from hvdtrain.comm.meeting_point import Address, Agent, SharedFile, meeting_point, parse
from hvdtrain.comm.slurm import host_names
from hvdtrain.comm.torch_dist import leaving
from hvdtrain.comm.torch_rendezvous import _check_in, meet
from hvdtrain.errors import DataError, LaunchError
from hvdtrain.plugins.local_ranks.reports import variables

SRUN = Place("srun", rank=3, size=5, local_rank=0, local_size=2)
MPIRUN = Place("mpirun", rank=1, size=2, local_rank=1, local_size=2)
STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[3-4],m1",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[1-3,7],m5", ["n1", "n2", "n3", "n7", "m5"]),
        ("cn1", ["cn1"]),
        ("gpu-a[009-011]", ["gpu-a009", "gpu-a010", "gpu-a011"]),
        ("r[1-2]n[1,3].cluster,login", ["r1n1.cluster", "r1n3.cluster", "r2n1.cluster", "r2n3.cluster", "login"]),
        ("", []),
    ],
)
def test_slurms_node_lists(text: str, hosts: list[str]) -> None:
    assert host_names(text) == hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://10.0.0.1:29500", Address(("10.0.0.1",), 29500)),
        ("tcp://[fe80::1]:29500", Address(("fe80::1",), 29500)),
        ("file:///shared/meet", SharedFile(Path("/shared/meet"))),
        ("file://meet", SharedFile(Path("meet"))),
    ],
)
def test_init_methods(text: str, expected: Any) -> None:
    assert parse(text) == expected
    assert meeting_point({"MASTER_ADDR": "other", "MASTER_PORT": "1"}, MPIRUN, text) == expected


@pytest.mark.parametrize("text", ["tcp://node1", "tcp://:29500", "tcp://node1:http", "file://", "node1:29500", "ftp://node1:3"])
def test_an_init_method_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="init_method: expected 'env://', 'tcp://HOST:PORT' or 'file:///PATH', got"):
        parse(text)


def test_the_environment_says_where() -> None:
    master = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", **master}
    assert meeting_point(torchrun, detect(torchrun)) == Address(("node1",), 29500)
    assert meeting_point({**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "True"}, detect(torchrun)) == Agent("node1", 29500)
    assert meeting_point({**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "False"}, detect(torchrun), "env://") == Address(
        ("node1",), 29500
    )
    assert meeting_point({**STEP, **master}, SRUN) == Address(("node1",), 29500)
    with pytest.raises(LaunchError, match="MASTER_PORT: expected a number, got 'http'"):
        meeting_point({"MASTER_ADDR": "node1", "MASTER_PORT": "http"}, MPIRUN)


def test_a_step_of_srun_meets_on_its_first_node() -> None:
    met = meeting_point(STEP, SRUN)
    assert isinstance(met, Address)
    assert met.hosts == ("n3",)
    assert 20000 <= met.port < 30000
    others = [
        meeting_point({**STEP, "SLURM_PROCID": "0"}, Place("srun", 0, 5, 0, 2)),
        meeting_point({**STEP, "SLURM_STEP_ID": "1"}, SRUN),
    ]
    assert others[0] == met  # every task works out the same
    assert others[1] != met  # another step of the same job another port
    assert meeting_point({**STEP, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.3"}, SRUN) == Address(("n3", "10.0.0.3"), met.port)
    assert meeting_point({**STEP, "MASTER_PORT": "4242"}, SRUN) == Address(("n3",), 4242)
    assert meeting_point(STEP, Place("srun", 1, 2, 1, 2)) == Address(("127.0.0.1",), met.port)


def test_an_mpirun_on_one_host_meets_there_and_one_on_several_does_not_know() -> None:
    environ = {"PMIX_NAMESPACE": "2887516161"}
    met = meeting_point(environ, MPIRUN)
    assert isinstance(met, Address)
    assert met.hosts == ("127.0.0.1",)
    assert met != meeting_point({"PMIX_NAMESPACE": "2887516162"}, MPIRUN)
    assert meeting_point(environ, Place("mpirun", 1, 4, 1, 2)) is None
    assert meeting_point({}, MPIRUN) is None


def test_processes_that_hvdtrain_started_meet_where_it_said() -> None:
    environ = {**STEP, **variables(Place("hvdtrain", 1, 2, 1, 2)), "HVDTRAIN_INIT_METHOD": "file:///tmp/x/address"}
    assert detect(environ) == Place("hvdtrain", 1, 2, 1, 2)
    assert meeting_point(environ, detect(environ)) == SharedFile(Path("/tmp/x/address"))
    assert meeting_point(environ, detect(environ), "tcp://h:1") == Address(("h",), 1)
    del environ["HVDTRAIN_INIT_METHOD"]  # each of several tasks of srun started some
    assert meeting_point({**environ, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, detect(environ)) == meeting_point(STEP, SRUN)


class CountedStore:
    """A store of torch.distributed that counts its questions."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.questions = 0

    def __getattr__(self, name: str) -> Any:
        self.questions += 1
        return getattr(self._store, name)


def check_in(ranks: list[tuple[int, int]], seconds: float = 60.0) -> tuple[list[str], int]:
    """Let ranks, each with the number of ranks that it knows of, meet; what each raised, and the number of questions."""
    store = CountedStore()

    def outcome(rank: int, size: int) -> str:
        try:
            _check_in(store, SharedFile(Path("/meet")), rank, size, time.monotonic() + seconds)  # type: ignore[arg-type]  # as a store
            return ""
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, *zip(*ranks, strict=True))), store.questions


def test_ranks_count_themselves_instead_of_each_other() -> None:
    found, questions = check_in([(rank, 40) for rank in range(40)])
    assert found == [""] * 40
    assert questions < 40 * 12  # a few of each, and some more of those that wait


def test_ranks_that_do_not_belong_together_all_say_why() -> None:
    assert (
        check_in([(0, 2), (0, 2)])[0]
        == ["file:///meet: expected distinct ranks, got rank 0 twice (does another job use the same address?)"] * 2
    )
    found, _ = check_in([(0, 2), (1, 3)])
    assert found[0] == found[1]
    assert found[0].startswith("file:///meet: expected the same number of processes on all ranks, got ")
    assert (
        check_in([(0, 40), (1, 40)], 1.0)[0]
        == ["file:///meet: expected 40 processes, got none with rank " + ", ".join(map(str, range(2, 18))) + ", 22 more in time"]
        * 2
    )


def test_ranks_of_a_program_meet_again_at_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as they train; the last one to leave keeps no one waiting, and what one job stored is not there for the next."""
    monkeypatch.setattr(torch_rendezvous, "KEPT", {})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def job(rank: int) -> tuple[bool, bytes]:
        store = meet(Address(("127.0.0.1",), port), rank, 2, 30.0, on_one_host=True, stays=True)
        was_empty = not store.check([str(rank)])
        store.set(str(rank), "done")
        return was_empty, store.get(str(1 - rank))

    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(job, (0, 1))) == [(True, b"done")] * 2


def test_an_error_of_one_rank_only_leaves_the_group() -> None:
    for kind, is_left in ((EOFError(), True), (DataError("on all").on_all_ranks(), False)):
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        with pytest.raises(type(kind)), leaving():
            raise kind
        assert torch.distributed.is_initialized() is not is_left
    torch.distributed.destroy_process_group()
