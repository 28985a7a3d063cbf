"""The findings of checks, their report, and the comparison of hosts."""

from __future__ import annotations

import ipaddress
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from hvdtrain.learner.frameworks import FRAMEWORKS, library_of

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report, or several, if the text has several.

    Attributes:
        about: what was checked, such as 'shared memory'.
        text: the result.
        fix: what to do about it; empty if nothing is wrong.
    """

    level: Level
    about: str
    text: str
    fix: str = ""


ok = partial(Finding, "ok")
"""Nothing is wrong."""

warning = partial(Finding, "warning")
"""Training will run, but slower than it could, or it may fail later."""

problem = partial(Finding, "problem")
"""Training will not start, or not work as intended."""


@dataclass
class HostReport:
    """The findings of one host.

    Attributes:
        facts: values by name that should be the same on all hosts, such as versions and files.
        address: of the interface that NCCL and Gloo should use, 'eth0 10.0.0.5/24'; empty if there is none.
        clock: the host's time in seconds, read on all hosts at the same moment; None: not read.
    """

    host: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    address: str = ""
    clock: float | None = None


def merge_findings(reports: Sequence[HostReport]) -> list[tuple[Finding, list[str]]]:
    """Every finding once, in the order of the first host that has it, with the hosts that have it."""
    hosts: dict[Finding, list[str]] = {}
    for report in reports:
        for finding in report.findings:
            hosts.setdefault(finding, []).append(report.host)
    return list(hosts.items())


INDENT = 9 * " "
"""The indentation of further lines of a finding: the width of the column of levels."""


def lines(reports: Sequence[HostReport]) -> list[str]:
    """The report. A finding of several hosts is one line, which names the hosts unless it is true for all.

    >>> for line in lines([HostReport("h1", [ok("clock", "right")]), HostReport("h2", [problem("disk", "full", "delete")])]):
    ...     print(line)
    ok       h1: clock: right
    problem  h2: disk: full (delete)
    """
    text = []
    for finding, hosts in merge_findings(reports):
        where = f"{', '.join(hosts)}: " if len(hosts) < len(reports) else ""
        hint = f" ({finding.fix})" if finding.fix else ""
        text.append(f"{finding.level:8} {where}{finding.about}: {finding.text}{hint}".replace("\n", "\n" + INDENT))
    return text


def wrap_report(text: Iterable[str], columns: int) -> list[str]:
    """Lines of a report for a terminal, broken between words. Tables, which are indented further, stay as they are.

    >>> print("\\n".join(wrap_report(["ok       limits: 20000 open files, 96365 processes"], 40)))
    ok       limits: 20000 open files, 96365
             processes
    """
    lines = []
    for line in "\n".join(text).split("\n"):
        is_table = line.startswith(INDENT + " ")
        wrapped = textwrap.wrap(line, columns, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)
        lines += [line] if is_table else wrapped
    return lines


def summary(findings: Iterable[Finding]) -> str:
    """The number of findings of each level.

    >>> summary([ok("a", "b"), problem("c", "d", "e"), ok("f", "g")])
    '1 problem, 0 warnings, 2 ok'
    """
    levels = [finding.level for finding in findings]
    counts = {level: levels.count(level) for level in ("problem", "warning")}
    counted = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items()]
    return ", ".join([*counted, f"{levels.count('ok')} ok"])


def libraries() -> tuple[str, ...]:
    """Those of all frameworks."""
    return tuple(dict.fromkeys(map(library_of, FRAMEWORKS)))


HARMFUL = ("hvdtrain", *libraries(), "horovod", "MPI of Horovod", "MPI of mpirun")
"""Facts that, like files, have to be the same on all hosts. A difference in other facts is only a warning."""


def of_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that should be the same on all hosts: mpirun exports only those named with -x."""
    rank_prefixes = ("HOROVOD_RANK", "HOROVOD_LOCAL", "HOROVOD_CROSS", "HOROVOD_HOSTNAME", "HOROVOD_SIZE", "HOROVOD_SECRET")
    return {
        name: value
        for name, value in environ.items()
        if name in ("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "PYTHONPATH")
        or (name.startswith(("NCCL_", "HOROVOD_", "GLOO_")) and not name.startswith(rank_prefixes))
    }


def differences(reports: Sequence[HostReport]) -> list[Finding]:
    """A finding for each fact that differs between hosts.

    >>> h1, h2 = HostReport("h1", facts={"torch": "2.13.0"}), HostReport("h2", facts={"torch": "2.9.0"})
    >>> [(finding.level, finding.text) for finding in differences([h1, h2])]
    [('problem', 'torch: 2.13.0 on h1; 2.9.0 on h2')]
    """
    findings = []
    for name in dict.fromkeys(name for report in reports for name in report.facts):
        hosts: dict[str, list[str]] = {}
        for report in reports:
            hosts.setdefault(report.facts.get(name, "not set"), []).append(report.host)
        if len(hosts) > 1:
            text = f"{name}: " + "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())
            is_file = "/" in name or "bytes" in next(iter(hosts))
            if is_file:
                fix = "the same file on all hosts, or a shared file system"
            elif name in HARMFUL:
                fix = "install the same version on all hosts"
            elif name.isupper():
                fix = f"mpirun -x {name}; sbatch --export=ALL; qsub -V"
            else:
                fix = "all hosts wait for the slowest one, and only what the oldest version supports works"
            findings.append((problem if is_file or name in HARMFUL else warning)("hosts differ", text, fix))
    if len(reports) > 1 and not findings:
        findings.append(ok("hosts", f"{', '.join(report.host for report in reports)}: the same versions, files and settings"))
    return findings


CLOCK_WARNING, CLOCK_PROBLEM = 1.0, 240.0
"""Seconds. Munge, which signs Slurm's messages, refuses messages that are five minutes old."""


def check_clocks(reports: Sequence[HostReport]) -> list[Finding]:
    """How much the hosts' clocks differ.

    >>> [finding.level for finding in check_clocks([HostReport("h1", clock=100.0), HostReport("h2", clock=103.5)])]
    ['warning']
    """
    clocks = [(report.clock, report.host) for report in reports if report.clock is not None]
    if len(clocks) < 2:
        return []
    (first, behind), (last, ahead) = min(clocks), max(clocks)
    apart = last - first
    if apart < CLOCK_WARNING:
        return [ok("clocks", f"within {max(apart, 0.001):.3f} s of each other")]
    level = problem if apart >= CLOCK_PROBLEM else warning
    text = f"{ahead} is {apart:.1f} s ahead of {behind}: times in logs and of files cannot be compared"
    return [level("clocks", text, "chronyc makestep, or ntp")]


def check_networks(reports: Sequence[HostReport]) -> list[Finding]:
    """Whether the interfaces that NCCL picks on each host are in one network.

    >>> hosts = [HostReport("h1", address="eth0 10.0.0.5/24"), HostReport("h2", address="ib0 10.9.0.6/24")]
    >>> check_networks(hosts)[0].level
    'warning'
    """
    addresses = [(report.host, *report.address.split()) for report in reports if report.address]
    networks = {str(ipaddress.ip_interface(address).network) for _, _, address in addresses}
    if len(addresses) < 2 or len(networks) == 1:
        return []
    text = "the hosts' interfaces are in different networks: " + ", ".join(map(" ".join, addresses))
    return [warning("interfaces", text, "set NCCL_SOCKET_IFNAME to a name or prefix that selects the same network on every host")]
