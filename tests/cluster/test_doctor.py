"""The doctor on several hosts: over ssh before anything is started, and among the ranks of an mpirun."""

import re
import sys
from pathlib import Path

from cluster.hosts import Hosts

DOCTOR = [sys.executable, "-m", "hvdtrain", "doctor"]
CONFIG = ["config.py", "++corpus", ".", "++use_horovod", "1"]
FIREWALL = "-p tcp --syn --dport 1024: -j REJECT --reject-with icmp-host-unreachable"  # ssh goes through


def reported(out: str, level: str, about: str) -> list[str]:
    return re.findall(rf"^{level} +{about}: (.*)$", out, flags=re.MULTILINE)


def test_hosts_are_looked_at_over_ssh(hosts: Hosts, work: Path) -> None:
    """A host with other data, one behind a firewall, one that does not exist."""
    hosts.run(f"mount --bind dev.hdf {work}/train.hdf", host="host2", folder=work)
    hosts.run(f"iptables -A INPUT {FIREWALL}", host="host1")
    try:
        done = hosts.run([*DOCTOR, "--hosts", "host1,host2,host9", *CONFIG], host="host3", folder=work)
    finally:
        hosts.run(f"iptables -D INPUT {FIREWALL}", host="host1")
        hosts.run(f"umount {work}/train.hdf", host="host2", folder=work)
    assert done.status == 2, done.out + done.err
    assert len(reported(done.out, "(?:ok|warning)", "ssh host[12]")) == 2  # the latter, where a login takes seconds
    [unknown] = reported(done.out, "problem", "ssh host9")
    assert "expected the name of a host" in unknown or "resolve" in unknown
    [firewall] = reported(done.out, "problem", "ports of host1")
    assert "No route to host" in firewall
    assert reported(done.out, "ok", "ports of host2") == [f"{hosts.address('host2')} is reached on a free port"]
    [data] = [line for line in reported(done.out, "problem", "hosts differ") if "train.hdf" in line]
    assert re.search(r"train.hdf: \d+ bytes, \w+ on host3, host1; \d+ bytes, \w+ on host2", data)
    assert reported(done.out, "ok", "clocks")


def test_ranks_on_several_hosts_tell_rank_0(hosts: Hosts, work: Path) -> None:
    """One report, each finding once; a cable that is cut would not be noticed; ranks and network are measured."""
    mpirun = ["mpirun", "-H", "host1:2,host2:1", "--bind-to", "none"]
    done = hosts.run([*mpirun, *DOCTOR, *CONFIG], host="host1", folder=work, timeout=240)
    assert done.status == 0, done.out + done.err
    assert reported(done.out, "ok", "hosts") == ["host1, host2: the same versions, files and settings"]
    assert reported(done.out, "ok", "connections") == ["each of 2 hosts reaches each other one"]
    [trap] = reported(done.out, "warning", "mpirun")
    assert "add --mca oob_tcp_keepalive_time 5" in trap
    assert len(reported(done.out, "ok", "packages")) == 1
    names = [line for line in done.out.splitlines() if "NCCL_SOCKET_IFNAME" in line]
    assert [line.split(": ", 2)[0].split()[-1] for line in names] == ["host1", "host2"]
    assert reported(done.out, "ok", "all-reduce")
    assert re.search(r"(ok|warning) +training step: [\d.]+ ms without exchange", done.out)
    assert reported(done.out, "ok", "clocks")
