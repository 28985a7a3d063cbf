"""Jobs of Slurm, and what trainings leave behind."""

import json
import time
from pathlib import Path

from cluster.hosts import Hosts

SLOWER = """
_train_step = train_step
def train_step(**arguments):
    if Path("slow").exists():
        time.sleep(0.1)
    _train_step(**arguments)
"""
"""Behind a config: its steps take longer while there is a file `slow`, until what a test does has been seen."""


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
        time.sleep(0.2)
    hosts.run(["scancel", job])
    raise AssertionError(f"job {job} still ran after {patience:g} s")
