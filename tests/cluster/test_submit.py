"""Job scripts of hvdtrain submit, submitted to a real Slurm on several hosts."""

import shutil
import sys
from pathlib import Path

import pytest
from cluster.hosts import Hosts, wait_for_file
from cluster.jobs import scores, wait_for_job
from launching import hvdtrain

SUBMIT = [sys.executable, "-m", "hvdtrain", "submit", "config.py", "--submit", "--name", "job"]
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


def test_a_script_for_slurm_with_torchrun(hosts: Hosts, work: Path, alone: dict[str, float]) -> None:
    """One agent a node, which meet on the first node at a port that depends on the job. Slurm reads a name with a space."""
    job = submit(
        hosts,
        work,
        *SIZE,
        "--output",
        "my logs",
        "--time",
        "10",
        "--interface",
        "eth0",
        "++corpus",
        ".",
        "++torch_distributed",
        "{}",
    )
    status = wait_for_job(hosts, job, 240)
    printed = (work / "my logs" / f"job-{job}.out").read_text()
    assert status == 0, printed
    assert "torch: 4 ranks, 2 on host1 (CPU), 2 on host2 (CPU)" in printed
    assert scores(work / "exp") == pytest.approx(alone, rel=1e-5)


def test_a_sweep_for_slurm_trains_its_runs(hosts: Hosts, work: Path) -> None:
    """A job array, whose runs end like trainings with these keys on this host do, each in a separate folder."""
    job = submit(hosts, work, "--time", "10", "--sweep", "learning_rate=0.01,0.03", "++corpus", ".")
    for number, rate in enumerate((0.01, 0.03), 1):
        status = wait_for_job(hosts, f"{job}_{number}", 240)
        printed = (work / f"job-{job}_{number}.out").read_text()
        assert status == 0, printed
        model = work / f"alone-{number}" / "model"
        alone = hvdtrain(work / "config.py", {"corpus": str(work), "learning_rate": rate, "model": model})
        assert alone.status == 0, alone.err
        assert scores(work / f"exp/learning_rate={rate}") == pytest.approx(scores(model.parent), rel=1e-5)


@pytest.mark.parametrize("scheduler", ["pbs", "lsf"])
def test_scripts_for_pbs_and_lsf_train_on_their_hosts(hosts: Hosts, work: Path, alone: dict[str, float], scheduler: str) -> None:
    """Neither of them is here, but what they leave to a script is: a file with a line for each slot, and LSF's blaunch."""
    size = ["--cpus-per-task", "1"] if scheduler == "pbs" else ["--cpus-per-task", "2"]  # LSF's slots are cores
    written = hosts.run([*SUBMIT[:-3], "--scheduler", scheduler, *SIZE, *size, "--out", "job.sh", *TRAINING], folder=work)
    assert written.status == 0, written.err
    slots = 2 if scheduler == "pbs" else 4
    (work / "slots").write_text("".join(f"{host}\n" * slots for host in ("host1", "host2")))
    (work / "bin").mkdir()
    (work / "bin" / "blaunch").symlink_to(str(shutil.which("ssh")))
    told = {"PBS_NODEFILE": str(work / "slots"), "LSB_DJOB_HOSTFILE": str(work / "slots")}
    done = hosts.run(f'PATH="{work}/bin:$PATH" bash job.sh', host="host1", environment=told, folder=work, timeout=240)
    assert done.status == 0, done.out + done.err
    assert "torch: 4 ranks, 2 on host1 (CPU), 2 on host2 (CPU)" in done.out
    assert scores(work / "exp") == pytest.approx(alone, rel=1e-5)


SLOWLY = """

def train_step(step=train_step, **values):
    time.sleep(0.05)
    step(**values)
"""


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_a_job_that_is_stopped_before_its_time_is_up_goes_on(hosts: Hosts, work: Path, launcher: str) -> None:
    """Slurm's signal reaches the trainer, which stops with a checkpoint; the job goes back into the queue and ends there."""
    with (work / "config.py").open("a") as config:
        config.write(SLOWLY)
    job = submit(hosts, work, *SIZE, "--launcher", launcher, "--time", "20", *TRAINING, "++num_epochs", "12")
    wait_for_file(work / "exp" / "scores.jsonl", 120)
    hosts.run(["scancel", "--batch", "--signal=USR1", job])  # what --signal=B:USR1@300 does, without the waiting
    status = wait_for_job(hosts, job, 240)
    printed = (work / f"job-{job}.out").read_text()
    assert status == 0, printed
    assert printed.count("stopped by SIGUSR1") == 1
    assert printed.count("training continues") == 1  # in the second run
    assert printed.count("Finished training in epoch 12.") == 1
    assert len((work / "exp" / "scores.jsonl").read_text().splitlines()) == 12
    assert " Restarts=1 " in hosts.run(["scontrol", "show", "job", job]).out


def test_a_task_that_is_killed_ends_the_job(hosts: Hosts, work: Path) -> None:
    """srun itself would leave the other tasks waiting forever; the script's option prevents that."""
    with (work / "config.py").open("a") as config:
        config.write(SLOWLY)
    more = ["--launcher", "srun", "--time", "20", "--no-requeue", *TRAINING, "++num_epochs", "1000"]
    job = submit(hosts, work, "--nodes", "2", "--tasks-per-node", "1", *more)
    wait_for_file(work / "exp" / "scores.jsonl", 120)
    victim = hosts.run(["pgrep", "-n", "-f", "bin/python -m hvdtrain config.py"]).out.strip()
    assert hosts.run(["kill", "-KILL", victim]).status == 0
    assert wait_for_job(hosts, job, 120) != 0
