"""Job scripts of hvdtrain.submit, submitted to a real Slurm on several hosts."""

import sys
from pathlib import Path

import pytest
from cluster.conftest import scores, wait_for_job
from cluster.hosts import Hosts

SUBMIT = [sys.executable, "-m", "hvdtrain.submit", "config.py", "--submit", "--name", "job"]
SIZE = ["--nodes", "2", "--tasks-per-node", "2"]
TRAINING = ["++corpus", ".", "++use_horovod", "1"]


def submit(hosts: Hosts, work: Path, *options: str) -> str:
    """Submit a job; its number."""
    done = hosts.run([*SUBMIT, "--scheduler", "slurm", *options], folder=work)
    assert done.status == 0, done.out + done.err
    return done.out.split()[-1]


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_a_script_for_slurm_trains(hosts: Hosts, work: Path, alone: dict[str, float], launcher: str) -> None:
    options = [*SIZE, "--launcher", launcher, "--time", "10", "--cpus-per-task", "1", "--interface", "eth0"]
    job = submit(hosts, work, *options, *(["--doctor"] if launcher == "mpirun" else []), *TRAINING)
    status = wait_for_job(hosts, job, 240)
    printed = (work / f"job-{job}.out").read_text()
    assert status == 0, printed
    assert "torch: 4 ranks, 2 on host1 (CPU), 2 on host2 (CPU)" in printed
    assert scores(work / "exp") == pytest.approx(alone, rel=1e-5)
    if launcher == "mpirun":
        assert "0 problems" in printed  # the doctor came first
