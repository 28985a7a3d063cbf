"""A training that loses a node, in the job that `hvdtrain submit --max-restarts` writes for Slurm: docs/elastic.md."""

import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from cluster.hosts import Hosts
from cluster.jobs import restarts, slow_down, start_slowly, stop, submit_slowly, wait_for_job, wait_until
from cluster.slurm import wait_until_idle

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.plugins.trace.records import has_begun, trained_on

EPOCHS = 4
EPOCH = Counter(range(231))

KEYS = {
    "corpus": ".",
    "torch_distributed": "{}",
    "num_epochs": EPOCHS,
    "max_seqs": 4,
    "save_interval_steps": 4,
    "watchdog_timeout": 300,
    "log_verbosity": 3,
}

SECONDS_TO_ASK = 4
"""After the start, until the watchdogs know which hosts answer them: others are not lost."""


def start(hosts: Hosts, work: Path, nodes: int) -> str:
    """Submit the job, and wait until it has saved on all of its nodes; its number."""
    size = ["--nodes", nodes, "--tasks-per-node", "1", "--cpus-per-task", "1", "--interface", "eth0", "--max-restarts", "3"]
    keys = [text for name, value in KEYS.items() for text in (f"++{name}", value)]
    job = submit_slowly(hosts, work, nodes, *size, *keys)
    folder = CheckpointFolder(work / "exp" / "model")
    wait_until(lambda: folder.newest() is not None, "a checkpoint that is complete")  # its files are written one by one
    return job


def finish(hosts: Hosts, work: Path, job: str) -> str:
    """Wait for the end; what the job printed. Every epoch was trained on every sequence once."""
    (work / "slow").unlink()
    status = wait_for_job(hosts, job, 400)
    printed = (work / f"job-{job}.out").read_text()
    assert status == 0, printed
    assert trained_on(work / "trace") == dict.fromkeys(range(1, EPOCHS + 1), EPOCH)
    epochs = [json.loads(line)["epoch"] for line in (work / "exp" / "scores.jsonl").read_text().splitlines()]
    assert epochs == list(range(1, EPOCHS + 1))
    assert printed.count(f"Finished training in epoch {EPOCHS}.") == 1, printed
    return printed


def end_host(hosts: Hosts, host: str) -> None:
    """End all processes on a host at once, as when it is restarted: none sees another one's end.

    So they are stopped first, and children end before their parents: what is stopped continues when its parent ends, and srun's
    child would still tell Slurm to end the step.
    """
    pids = sorted(processes_on(hosts, host), key=int, reverse=True)
    assert len(pids) >= 3, pids
    for signal in ("STOP", "KILL"):
        hosts.run(["kill", f"-{signal}", *pids])  # one of them may have just ended
    wait_until(lambda: not processes_on(hosts, host), f"the end of {host}", 20)


def processes_on(hosts: Hosts, host: str) -> list[str]:
    """The numbers of the processes in a host's network, without those that are the host itself."""
    lookup = (
        "for each in /proc/[0-9]*; do [ $(readlink $each/ns/net) = $(readlink /proc/self/ns/net) ] && echo ${each#/proc/}; done"
    )
    there = hosts.run(f"{lookup} 2>/dev/null; true", host=host).out.split()
    lines = [line for line in hosts.processes("") if "sshd" not in line and "sleep infinity" not in line]
    return [line.split()[0] for line in lines if line.split()[0] in there]


@pytest.mark.parametrize("how", ["restart", "cable"])
def test_the_others_go_on_without_a_lost_node(hosts: Hosts, work: Path, how: str) -> None:
    """A pulled cable looks to the others as a node without power does: nothing comes from there, and its kernel does not answer
    either. Its processes continue running.
    """
    job = start(hosts, work, nodes=3)
    time.sleep(SECONDS_TO_ASK)
    (end_host if how == "restart" else Hosts.pull_cable)(hosts, "host2")
    began = time.monotonic()
    try:
        wait_until(lambda: has_begun(work / "trace", 1, 2), "a step of two ranks", 300)
        seconds = time.monotonic() - began
        printed = finish(hosts, work, job)
    finally:
        hosts.daemon(["slurmd"], host="host2") if how == "restart" else hosts.plug_cable("host2")
        wait_until_idle(hosts, patience=120)
        # Slurm's own process of the step was cut off, too, and tries now and then to report its end.
        wait_until(lambda: not hosts.processes("slurmstepd"), "the end of the step", 180)
    assert restarts(hosts, job) == 0
    assert "training continues in epoch" in printed
    print(f"{how}: {seconds:.1f} s to the next step")
    assert seconds < 45, printed
    assert (how == "restart") != bool(re.search(r"host2 with rank \d has not answered for \d+ s", printed)), printed


def test_hosts_that_lose_each_other_end_their_ranks_if_torchrun_starts_them_again(hosts: Hosts, work: Path) -> None:
    """Rank 0's host and another one, each of which takes the other for lost."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": "29511", "TORCHELASTIC_MAX_RESTARTS": "3"}
    slow_down(work)
    command = "exec python -m hvdtrain config.py ++torch_distributed {} ++num_epochs 100000 ++watchdog_timeout 600"
    ranks = [
        hosts.start(command, f"host{rank + 1}", variables | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"}, work)
        for rank in (0, 1)
    ]
    wait_until(lambda: has_begun(work / "trace", 0, 2), "a step")
    time.sleep(SECONDS_TO_ASK)
    hosts.pull_cable("host2")
    began = time.monotonic()
    try:
        finished = [rank.finish(60) for rank in ranks]
    finally:
        hosts.plug_cable("host2")
    assert 10 < time.monotonic() - began < 45
    for one, lost in zip(finished, ("host2 with rank 1", "host1 with rank 0"), strict=True):
        assert one.status == 1
        assert len(re.findall(f"{lost} has not answered for \\d+ s, so it has lost power or", one.err)) == 1, one.err


def test_a_job_that_is_stopped_or_loses_its_first_node_is_queued_again_and_goes_on(hosts: Hosts, work: Path) -> None:
    """As before its time limit; test_submit.py does it with other launchers. On the first node, the script runs, and torchrun's
    agents meet there.
    """
    job = start(hosts, work, nodes=2)
    stop(hosts, job)
    wait_until(lambda: has_begun(work / "trace", 1, 2), "a step after the stop", 300)
    first = hosts.run(["scontrol", "show", "job", job]).out.split("BatchHost=")[1].split()[0]
    end_host(hosts, first)
    try:
        wait_until(lambda: restarts(hosts, job) == 2, "back in the queue", 120)
    finally:
        hosts.daemon(["slurmd"], host=first)
    wait_until(lambda: has_begun(work / "trace", 2, 2), "a step after the loss", 300)
    printed = finish(hosts, work, job)
    assert "stopped by SIGTERM in epoch" in printed
    assert printed.count("training continues in epoch") == 2
    wait_until_idle(hosts, patience=60)


def test_ranks_that_srun_started_itself_end_with_a_lost_node(hosts: Hosts, work: Path) -> None:
    """Also with --no-kill."""
    keys = "++use_horovod 1 ++num_epochs 100000 ++watchdog_timeout 20"
    started = start_slowly(hosts, work, f"srun --no-kill -N2 -n2 -w host1,host2 python -m hvdtrain config.py {keys}")
    end_host(hosts, "host2")
    try:
        finished = started.finish(200)
    finally:
        hosts.daemon(["slurmd"], host="host2")
        wait_until_idle(hosts, patience=120)
    assert finished.status != 0
    assert "Finished training" not in finished.out
