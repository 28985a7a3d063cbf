"""Slurm from Debian's packages, for real: one slurmd on each of the hosts, munged and slurmctld on the head."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cluster.hosts import HEAD, PATIENCE, Hosts

CPUS = 4

# What differs from a cluster that runs for years: no cgroups, accounting or systemd; nodes claim more cores than there are;
# what usually takes minutes (a lost node, a job put back into the queue) takes seconds. Every node has a separate TmpFS:
# the nodes share a file system, and what PMIx puts there would collide.
CONFIG = """\
ClusterName=tests
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=10
"""

NODE = (
    "NodeName={name} NodeAddr={address} CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 "
    "RealMemory=1000 State=UNKNOWN\n"
)


def start_slurm(hosts: Hosts) -> None:
    """Start Slurm; it ends with the hosts."""
    folder = hosts.folder
    config = CONFIG.format(head=HEAD, address=hosts.address(HEAD), folder=folder)
    for name in hosts.names:
        config += NODE.format(name=name, address=hosts.address(name), cpus=CPUS)
        (folder / f"tmp-{name}").mkdir()
    config += f"PartitionName=all Nodes={','.join(hosts.names)} Default=YES MaxTime=INFINITE State=UP\n"
    (folder / "slurm.conf").write_text(config)
    hosts.environment["SLURM_CONF"] = str(folder / "slurm.conf")

    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    # One munged serves all: its socket is a file, which is the same on all hosts.
    files = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    hosts.daemon(["munged", f"--key-file={key}", *files])
    hosts.daemon(["slurmctld"])
    for name in hosts.names:
        hosts.daemon(["slurmd"], host=name)
    wait_until_idle(hosts)


def wait_until_idle(hosts: Hosts, patience: float = PATIENCE) -> None:
    """Wait until no node is busy."""
    deadline = time.monotonic() + patience
    states: list[str] = []
    while time.monotonic() < deadline:
        states = hosts.run(["sinfo", "-h", "-N", "-o", "%t"]).out.split()
        if states == ["idle"] * len(hosts.names):
            return
        time.sleep(0.3)
    raise RuntimeError(f"nodes are {states}:\n{Path(hosts.folder / 'slurmctld.log').read_text()[-3000:]}")


def logs_of_slurm(hosts: Hosts) -> str:
    """The state of nodes and jobs, and the end of each daemon's log."""
    parts = [hosts.run(["sinfo", "-N", "-l"]).out, hosts.run(["scontrol", "show", "job"]).out]
    for log in sorted(hosts.folder.glob("slurm*.log")):
        parts.append(f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:]))
    return "\n".join(parts)
