"""What happens on several hosts when something goes wrong, and what docs/launching.md says about it."""

import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from cluster.hosts import Hosts, Started
from cluster.jobs import slow_down, start_slowly, stop, submit, wait_for_job, wait_until
from cluster.slurm import wait_until_idle
from launching import Finished
from launching_page import PAGE, read_page

from hvdtrain.comm.this_process import KEEPALIVE
from hvdtrain.plugins.trace.records import has_begun, trained_on

ENDLESS = "python -m hvdtrain config.py ++use_horovod 1 ++num_epochs 100000"


def time_to_end(started: Started, limit: float) -> tuple[float, Finished]:
    """How long from now on a job runs."""
    began = time.monotonic()
    finished = started.finish(limit)
    return time.monotonic() - began, finished


def test_mpirun_notices_a_pulled_cable_with_the_flags_of_the_page(hosts: Hosts, work: Path) -> None:
    assert KEEPALIVE in PAGE.read_text()
    started = start_slowly(hosts, work, f"mpirun -np 2 -H host1:1,host2:1 --bind-to none -x PATH {KEEPALIVE} {ENDLESS}")
    hosts.pull_cable("host2")
    try:
        seconds, finished = time_to_end(started, limit=60)
    finally:
        hosts.plug_cable("host2")
    assert finished.status != 0
    assert re.search(
        "ORTE (has lost communication with a remote daemon|was unable to reliably start)", finished.err
    )  # by what it did last
    assert 5 < seconds < 30  # 12 s where nothing else runs


def test_without_the_flags_the_watchdogs_end_mpirun_and_its_daemons(hosts: Hosts, work: Path) -> None:
    """mpirun is on a host of the job. Its daemon on the lost host ends there."""
    ssh = "--mca plm_rsh_args '-o ServerAliveInterval=0'"  # or ssh would notice it, whose end mpirun notices
    mpirun = f"mpirun -np 2 -H host1:1,host2:1 --bind-to none -x PATH {ssh}"
    started = start_slowly(hosts, work, f"{mpirun} {ENDLESS} ++watchdog_timeout 10", "host1")
    hosts.pull_cable("host2")
    try:
        seconds, finished = time_to_end(started, limit=120)
        wait_until(
            lambda: all("/ssh " in line for line in hosts.processes("hvdtrain", "orted")),
            "nothing left but the ssh to the lost host",
        )
    finally:
        hosts.plug_cable("host2")
    assert finished.status != 0
    assert re.search(r"rank 1 on host2 has sent no heartbeat for \d+ s", finished.err), finished.err
    assert seconds < 100


def test_gloo_and_slurm_notice_a_pulled_cable(hosts: Hosts, work: Path) -> None:
    command = f"srun -K -w host1,host2 -N2 -n2 {ENDLESS}"
    started = start_slowly(hosts, work, command, HOROVOD_GLOO_TIMEOUT_SECONDS="10")
    hosts.pull_cable("host2")
    try:
        seconds, finished = time_to_end(started, limit=120)
    finally:
        hosts.plug_cable("host2")
    assert finished.status != 0
    assert seconds < 90
    wait_until_idle(hosts, patience=90)  # the node comes back, and its task is ended


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        pytest.param("-K --mpi=pmix", signal.SIGKILL, marks=pytest.mark.again),
        ("-K --mpi=none", signal.SIGKILL),
        ("--mpi=pmix", signal.SIGKILL),
        ("-K --mpi=pmix", signal.SIGSTOP),
    ],
)
def test_a_task_that_is_killed_or_stopped_ends_the_step(hosts: Hosts, work: Path, options: str, fault: signal.Signals) -> None:
    """srun itself ends the others 30 s (KillWait) after the first, and without -K never."""
    timeout = "++watchdog_timeout 10" if fault == signal.SIGSTOP else ""
    started = start_slowly(hosts, work, f"srun {options} -N2 -n2 {ENDLESS} {timeout}")
    victim = hosts.run(["pgrep", "-n", "-f", "bin/python -m hvdtrain"]).out.strip()
    assert hosts.run(["kill", f"-{fault.value}", victim]).status == 0
    seconds, finished = time_to_end(started, limit=60)
    assert finished.status != 0
    assert seconds < (20 if fault == signal.SIGKILL else 40)  # of which 10 are the watchdog's


def test_a_job_is_put_back_into_the_queue_before_its_time_is_up_and_goes_on(hosts: Hosts, work: Path) -> None:
    """The script is the page's; the signal that Slurm sends ten minutes before the end is sent by hand, as soon as it can be."""
    script = next(command for command in read_page() if command.mode == "requeued").lines[0][1]
    assert "--signal=B:USR1@600" in script
    slow_down(work)
    job = submit(hosts, work, script)
    wait_until(lambda: has_begun(work / "trace", 0, 2), "a step")
    stop(hosts, job)
    (work / "slow").unlink()
    status = wait_for_job(hosts, job, patience=120)
    printed = (work / f"slurm-{job}.out").read_text()
    assert status == 0, printed
    assert printed.count("torch: 2 ranks, 1 on host") == 2, printed  # two runs
    assert printed.count("training continues ") == 1, printed
    assert printed.count("Finished training in epoch 1.") == 1
    assert trained_on(work / "trace") == {1: Counter(range(231))}


def test_a_job_fails_when_its_training_does(hosts: Hosts, work: Path) -> None:
    (work / "config.py").write_text("learning_rat = 1\n")
    scripts = [command.lines[0][1] for command in read_page() if command.script]
    for script, job in [(script, submit(hosts, work, script)) for script in scripts]:
        assert wait_for_job(hosts, job, patience=120) != 0, script
        assert "learning_rat: unknown key in config.py" in (work / f"slurm-{job}.out").read_text(), script


@pytest.mark.again  # tests/launchers/test_failures.py does it with mpirun
def test_tasks_of_srun_that_do_not_know_how_they_belong_together_refuse(hosts: Hosts, work: Path) -> None:
    finished = hosts.run("srun -N2 -n3 python -m hvdtrain config.py", folder=work)
    assert finished.status == 2
    assert finished.err.count("expected use_horovod or torch_distributed to connect the 3 processes that srun started") == 1
    assert not (work / "exp").exists()


def test_pmi2_ends_in_the_words_that_the_page_quotes(hosts: Hosts, work: Path) -> None:
    finished = hosts.run("srun --mpi=pmi2 -N2 -n2 python -m hvdtrain config.py ++use_horovod 1", folder=work)
    assert finished.status != 0
    told = " ".join(finished.err.split())
    assert "OMPI was not built with SLURM's PMI support" in told
    assert "OMPI was not built with SLURM's PMI support" in PAGE.read_text()
