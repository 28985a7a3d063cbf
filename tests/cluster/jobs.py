"""Jobs of Slurm, and what trainings leave behind."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.hosts import HEAD, Hosts, Started

from hvdtrain.plugins.trace.records import has_begun

SUBMIT = [sys.executable, "-m", "hvdtrain", "submit", "config.py", "--submit", "--name", "job", "--scheduler", "slurm"]

SLOWER = """
_train_step = train_step
def train_step(**arguments):
    if Path("slow").exists():
        time.sleep(0.5)
    _train_step(**arguments)
trace_sequences = "trace"
"""
"""Behind a config: its steps take long while there is a file `slow`, until what a test does has been seen."""


def slow_down(work: Path) -> None:
    """Have the trainings of a folder's config take long, until the test removes `slow`."""
    with (work / "config.py").open("a") as config:
        config.write(SLOWER)
    (work / "slow").touch()


def start_slowly(hosts: Hosts, work: Path, command: str, host: str = HEAD, **environment: str) -> Started:
    """Start a training on two ranks, and wait for their first step."""
    slow_down(work)
    started = hosts.start(command, host, environment, work)
    wait_until(lambda: has_begun(work / "trace", 0, 2) or started.process.poll() is not None, "a step")
    assert started.process.poll() is None, started.finish(1)
    return started


def submit_slowly(hosts: Hosts, work: Path, ranks: int, *options: object) -> str:
    """Submit a training, and wait for its first step; the job's number."""
    slow_down(work)
    job = submit_with(hosts, work, *options)
    wait_until(lambda: has_begun(work / "trace", 0, ranks), f"a step of {ranks} ranks", 240)
    return job


def submit_with(hosts: Hosts, work: Path, *options: object) -> str:
    """Give the script of `hvdtrain submit` to Slurm; the job's number."""
    done = hosts.run([*SUBMIT, *options], folder=work)
    assert done.status == 0, done.out + done.err
    return done.out.split()[-1]


def stop(hosts: Hosts, job: str) -> None:
    """Send a job the signal that comes before its time is up, and wait until it is back in the queue."""
    hosts.run(["scancel", "--batch", "--signal=USR1", job])
    wait_until(lambda: restarts(hosts, job) == 1, "back in the queue")


def restarts(hosts: Hosts, job: str) -> int:
    """How often a job has been put back into the queue."""
    return int(hosts.run(["scontrol", "show", "job", job]).out.split(" Restarts=")[1].split()[0])


def wait_until(done: Callable[[], bool], what: str, patience: float = 120) -> None:
    """Look again and again."""
    deadline = time.monotonic() + patience
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {patience:g} s"
        time.sleep(0.2)


def scores(folder: Path) -> dict[str, float]:
    """The last epoch's scores."""
    return json.loads((folder / "scores.jsonl").read_text().splitlines()[-1])["scores"]


def submit(hosts: Hosts, folder: Path, script: str) -> str:
    """Give a script to sbatch; the job's number."""
    (folder / "job.sh").write_text(script)
    submitted = hosts.run(["sbatch", "job.sh"], folder=folder)
    assert submitted.status == 0, submitted.err
    return submitted.out.split()[-1]


def wait_for_job(hosts: Hosts, job: str, patience: float) -> int:
    """Wait until a job is over; its exit status."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        told = hosts.run(["scontrol", "show", "job", job]).out
        if any(f"JobState={state}" in told for state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")):
            return int(told.split("ExitCode=")[1].split(":")[0])
        time.sleep(0.5)
    hosts.run(["scancel", job])
    raise AssertionError(f"job {job} still ran after {patience:g} s")
