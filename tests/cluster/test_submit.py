"""Job scripts of hvdtrain submit, submitted to a real Slurm on several hosts."""

import shutil
from pathlib import Path

import pytest
from cluster.hosts import Hosts
from cluster.jobs import SUBMIT, scores, stop, submit_slowly, submit_with, wait_for_job
from launching import hvdtrain

SIZE = ["--nodes", "2", "--tasks-per-node", "1", "--cpus-per-task", "1"]
TRAINING = ["++corpus", ".", "++use_horovod", "1"]


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_a_job_of_slurm_that_is_stopped_before_its_time_is_up_goes_on(
    hosts: Hosts, work: Path, alone: dict[str, float], launcher: str
) -> None:
    """Slurm's signal reaches the trainer, which stops with a checkpoint; the job goes back into the queue, and ends as if nothing
    had happened.
    """
    options = [*SIZE, "--launcher", launcher, "--time", "20", "--interface", "eth0"]
    job = submit_slowly(hosts, work, 2, *options, *TRAINING)
    stop(hosts, job)
    (work / "slow").unlink()
    status = wait_for_job(hosts, job, 240)
    printed = (work / f"job-{job}.out").read_text()
    assert status == 0, printed
    assert printed.count("torch: 2 ranks, 1 on host") == 2
    assert printed.count("stopped by SIGUSR1") == 1
    assert printed.count("training continues") == 1  # in the second run
    assert printed.count("Finished training in epoch 1.") == 1
    assert scores(work / "exp") == pytest.approx(alone, rel=1e-5)


def test_a_script_for_slurm_with_torchrun(hosts: Hosts, work: Path, alone: dict[str, float]) -> None:
    """One agent a node, which meet on the first node at a port that depends on the job. Slurm reads a name with a space."""
    options = ["--nodes", "2", "--tasks-per-node", "2", "--output", "my logs", "--time", "10", "--interface", "eth0"]
    job = submit_with(hosts, work, *options, "++corpus", ".", "++torch_distributed", "{}")
    status = wait_for_job(hosts, job, 240)
    printed = (work / "my logs" / f"job-{job}.out").read_text()
    assert status == 0, printed
    assert "torch: 4 ranks, 2 on host1 (CPU), 2 on host2 (CPU)" in printed
    assert scores(work / "exp") == pytest.approx(alone, rel=1e-5)


def test_a_sweep_for_slurm_trains_its_runs(hosts: Hosts, work: Path) -> None:
    """A job array, whose runs end like trainings with these keys on this host do, each in a separate folder."""
    job = submit_with(hosts, work, "--time", "10", "--sweep", "learning_rate=0.01,0.03", "++corpus", ".")
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
    """Neither of them is here, but what they leave to a script is: a file with a line for each slot, and LSF's blaunch, whose
    slots are cores. LSF's doctor comes first.
    """
    per_node, cpus, more = (2, 1, []) if scheduler == "pbs" else (1, 2, ["--doctor"])
    size = ["--nodes", 2, "--tasks-per-node", per_node, "--cpus-per-task", cpus]
    script = ["--scheduler", scheduler, "--out", "job.sh"]
    written = hosts.run([*SUBMIT[:-5], *script, *size, *more, *TRAINING], folder=work)
    assert written.status == 0, written.err
    (work / "slots").write_text("host1\n" * 2 + "host2\n" * 2)
    (work / "bin").mkdir()
    (work / "bin" / "blaunch").symlink_to(str(shutil.which("ssh")))
    told = {"PBS_NODEFILE": str(work / "slots"), "LSB_DJOB_HOSTFILE": str(work / "slots")}
    done = hosts.run(f'PATH="{work}/bin:$PATH" bash job.sh', host="host1", environment=told, folder=work, timeout=240)
    assert done.status == 0, done.out + done.err
    assert f"torch: {2 * per_node} ranks, {per_node} on host1 (CPU), {per_node} on host2 (CPU)" in done.out
    assert ("0 problems" in done.out) == bool(more)
    assert scores(work / "exp") == pytest.approx(alone, rel=1e-5)


def test_a_task_that_is_killed_ends_the_job(hosts: Hosts, work: Path) -> None:
    """srun itself would leave the other tasks waiting forever; the script's option prevents that."""
    more = ["--launcher", "srun", "--time", "20", "--no-requeue", *TRAINING, "++num_epochs", "1000"]
    job = submit_slowly(hosts, work, 2, *SIZE, *more)
    victim = hosts.run(["pgrep", "-n", "-f", "bin/python -m hvdtrain config.py"]).out.strip()
    assert hosts.run(["kill", "-KILL", victim]).status == 0
    assert wait_for_job(hosts, job, 120) != 0
