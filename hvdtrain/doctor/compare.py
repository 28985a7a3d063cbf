"""What differs between hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from hvdtrain.doctor.findings import Finding, HostReport, ok, problem, warning

HARMFUL = ("hvdtrain", "torch", "tensorflow", "horovod", "MPI of Horovod", "MPI of mpirun")
"""Facts that have to be the same; files as well. Others may differ, at a price."""

CLOCK_WARNING, CLOCK_PROBLEM = 1.0, 240.0
"""Seconds. Munge, which vouches for Slurm's messages, refuses those that are five minutes old."""


def of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that should be the same on all hosts: mpirun hands on only those it is told to."""
    of_one_rank = ("HOROVOD_RANK", "HOROVOD_LOCAL", "HOROVOD_CROSS", "HOROVOD_HOSTNAME", "HOROVOD_SIZE", "HOROVOD_SECRET")
    return {
        name: value
        for name, value in environ.items()
        if name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "PYTHONPATH")
        or (name.startswith(("NCCL_", "HOROVOD_", "GLOO_")) and not name.startswith(of_one_rank))
    }


def differences(reports: Sequence[HostReport]) -> list[Finding]:
    """One line for every fact that is not the same on all hosts.

    >>> h1, h2 = HostReport("h1", facts={"torch": "2.13.0"}), HostReport("h2", facts={"torch": "2.9.0"})
    >>> [(each.level, each.text) for each in differences([h1, h2])]
    [('problem', 'torch: 2.13.0 on h1; 2.9.0 on h2')]
    """
    findings = []
    for name in dict.fromkeys(name for report in reports for name in report.facts):
        hosts: dict[str, list[str]] = {}
        for report in reports:
            hosts.setdefault(report.facts.get(name, "not set"), []).append(report.host)
        if len(hosts) > 1:
            text = f"{name}: " + "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())
            if "/" in name or "bytes" in next(iter(hosts)):
                findings.append(problem("hosts differ", text, "the same file on all hosts, or a shared file system"))
            elif name in HARMFUL:
                findings.append(problem("hosts differ", text, "install the same version on all hosts"))
            elif name.isupper():
                findings.append(warning("hosts differ", text, f"mpirun -x {name}; sbatch --export=ALL; qsub -V"))
            else:
                findings.append(warning("hosts differ", text, "the slowest host sets the pace, the oldest version what works"))
    if len(reports) > 1 and not findings:
        findings.append(ok("hosts", f"{', '.join(report.host for report in reports)}: the same versions, files and settings"))
    return findings


def check_clocks(reports: Sequence[HostReport]) -> list[Finding]:
    """How far the hosts' clocks are apart.

    >>> [each.level for each in check_clocks([HostReport("h1", clock=100.0), HostReport("h2", clock=103.5)])]
    ['warning']
    """
    known = [(report.clock, report.host) for report in reports if report.clock is not None]
    if len(known) < 2:
        return []
    (first, behind), (last, ahead) = min(known), max(known)
    apart = last - first
    if apart < CLOCK_WARNING:
        return [ok("clocks", f"within {max(apart, 0.001):.3f} s of each other")]
    level = problem if apart >= CLOCK_PROBLEM else warning
    return [
        level(
            "clocks",
            f"{ahead} is {apart:.1f} s ahead of {behind}: times in logs and of files mislead",
            "chronyc makestep, or ntp",
        )
    ]


def check_networks(reports: Sequence[HostReport]) -> list[Finding]:
    """Whether the interfaces that NCCL picks on each host lie in one network.

    >>> hosts = [HostReport("h1", address="eth0 10.0.0.5/24"), HostReport("h2", address="ib0 10.9.0.6/24")]
    >>> check_networks(hosts)[0].level
    'warning'
    """
    addresses = [(report.host, *report.address.split()) for report in reports if report.address]
    networks = {str(ipaddress.ip_interface(address).network) for _, _, address in addresses}
    if len(addresses) < 2 or len(networks) == 1:
        return []
    text = "the hosts' interfaces are in different networks: " + ", ".join(f"{each[0]} {each[1]} {each[2]}" for each in addresses)
    return [warning("interfaces", text, "NCCL_SOCKET_IFNAME with a name, or a beginning, that means the same network everywhere")]
