"""Every command and job script of docs/launching.md, run as it stands on three hosts with Slurm."""

import re
from pathlib import Path

import pytest
from cluster.hosts import Hosts
from cluster.jobs import scores, submit, wait_for_job
from launching import ROOT
from launching_page import Command, read_page

TRAININGS = [command for command in read_page() if command.mode == "runs"]
DEMOS = [command for command in read_page() if command.mode == "demo"]
REFUSED = [command for command in read_page() if command.mode == "refused"]
TIMEOUT = 240


def name_of(command: Command) -> str:
    return f"{command.name} ({command.ranks} ranks)"


@pytest.mark.parametrize("command", TRAININGS, ids=name_of)
def test_a_training(hosts: Hosts, work: Path, alone: dict[str, float], command: Command) -> None:
    status, printed = run(hosts, work, command)
    assert status == 0, printed
    assert f"torch: {command.ranks} rank{'s' if command.ranks > 1 else ''}, " in printed
    assert printed.count("Finished training in epoch 1.") == 1, printed  # one job, not several of size 1
    reached = scores(work / "exp")
    assert reached.keys() == alone.keys()
    if command.same_losses:
        assert reached == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("command", REFUSED, ids=name_of)
def test_what_is_refused(hosts: Hosts, work: Path, command: Command) -> None:
    status, printed = run(hosts, work, command)
    assert status == 2
    assert re.search(r"expected .*, got .*\(.*\)", printed), printed
    assert "Traceback" not in printed
    assert not (work / "exp").exists()


@pytest.mark.parametrize("command", DEMOS, ids=name_of)
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
