"""Every command and job script of docs/launching.md, run as it stands on three hosts with Slurm."""

import re
from pathlib import Path
from typing import Any

import pytest
from cluster.hosts import Hosts
from cluster.jobs import scores, submit, wait_for_job
from launching import ROOT
from launching_page import Command, read_page

from hvdtrain.comm.this_process import KEEPALIVE

AGAIN = (
    "mpirun -np 4 -bind-to none -map-by slot -x NCCL",  # as in tests/launchers/test_job_manager.py
    "mpirun -np 4 -H host1:2,host2:2",  # as with 3 ranks
    "mpirun -np 8 -mca pml ob1",  # the demo on one host: tests/test_demo.py
    "python -m hvdtrain config.py ++ngpu 4",  # as on two hosts, and with CUDA_VISIBLE_DEVICES; what is refused: as with 2
    "python -m hvdtrain config.py ++ngpu 1",  # as on two hosts with ++ngpu 2, and as under srun
    "srun -K -c2",  # as under mpirun with ++ngpu 2, and as under srun with ++ngpu 1
    "python -m torch.distributed.launch --nproc_per_node=2 --nnodes=2",  # as on one host, and as with torchrun on two
    "python -m torch.distributed.launch --nnodes=2",  # the same with --use_env, as torchrun does
    "MASTER_ADDR=host1 MASTER_PORT=29503",  # as with ++dist_master_addr, and with RANK beside it
    "torchrun --nnodes=1",  # as in tests/launchers/test_elastic.py, and on two hosts
    "srun -K --mpi=pmix -N2 --ntasks-per-node=2",  # as in the first script
    "srun -K -N2 --ntasks-per-node=2",  # as with 3 ranks
    "srun -K -n5 -N3 --gpus-per-task 1 python -m hvdtrain config.py ++use_horovod",  # as with torch.distributed
)
"""How commands begin that only combine what other ones prove."""

TIMEOUT = 240


def commands(mode: str) -> list[Any]:
    """Parameters of a test: the page's commands of a kind."""
    return [
        pytest.param(
            command,
            marks=[pytest.mark.again] if command.name.startswith(AGAIN) else [],
            id=f"{command.name} ({command.ranks} ranks)",
        )
        for command in read_page()
        if command.mode == mode
    ]


@pytest.mark.parametrize("command", commands("runs"))
def test_a_training(hosts: Hosts, work: Path, alone: dict[str, float], command: Command) -> None:
    status, printed = run(hosts, work, command)
    assert status == 0, printed
    assert f"torch: {command.ranks} rank{'s' if command.ranks > 1 else ''}, " in printed
    assert printed.count("Finished training in epoch 1.") == 1, printed  # one job, not several of size 1
    if command.name.startswith("mpirun"):
        several = " on host2 " in printed
        assert ("mpirun does not notice when a host is lost" in printed) == (several and KEEPALIVE not in command.name)
    assert not (work / ".dist_init").exists()  # at which they may have met
    reached = scores(work / "exp")
    assert reached.keys() == alone.keys()
    if command.same_losses:
        assert reached == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("command", commands("refused"))
def test_what_is_refused(hosts: Hosts, work: Path, command: Command) -> None:
    status, printed = run(hosts, work, command)
    assert status == 2
    assert re.search(r"expected .*, got .*\(.*\)", printed), printed
    assert "Traceback" not in printed
    assert not (work / "exp").exists()


@pytest.mark.parametrize("command", commands("demo"))
def test_the_demo(hosts: Hosts, work: Path, command: Command) -> None:
    (work / "demos").symlink_to(ROOT / "demos")
    status, printed = run(hosts, work, command)
    assert status == 0, printed
    ranks = range(command.ranks)
    assert [rank for rank in ranks if f"hello over Horovod from rank {rank} of {command.ranks}," in printed] == list(ranks)
    over_mpi = "srun" not in command.name or "--mpi=pmix" in command.name
    heard = [rank for rank in ranks if f"hello over MPI from rank {rank} of {command.ranks} on " in printed]
    assert heard == (list(ranks) if over_mpi else [])
    expected = command.ranks * (command.ranks + 1) // 2
    assert f"sum of 1 to {command.ranks}: {expected}, expected {expected};" in printed


def run(hosts: Hosts, folder: Path, command: Command) -> tuple[int, str]:
    """Run a row's commands, each on its host, or submit a job script; the worst status, and all that was printed."""
    if command.script:
        job = submit(hosts, folder, command.lines[0][1])
        return wait_for_job(hosts, job, TIMEOUT), (folder / f"slurm-{job}.out").read_text()
    started = [hosts.start(line.replace(command.without, ""), host, folder=folder) for host, line in command.lines]
    finished = [one.finish(TIMEOUT) for one in started]
    return max(one.status for one in finished), "".join(one.out + one.err for one in finished)
