"""What a check found: one line each, with the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        about: what was looked at, such as 'shared memory'.
        text: what was found.
        fix: what to do about it; empty where all is well.
    """

    level: Level
    about: str
    text: str
    fix: str = ""


def ok(about: str, text: str) -> Finding:
    """All is well."""
    return Finding("ok", about, text)


def warning(about: str, text: str, fix: str) -> Finding:
    """Training will run, but not as it could, or not for ever."""
    return Finding("warning", about, text, fix)


def problem(about: str, text: str, fix: str) -> Finding:
    """Training will not start, or not do what is meant."""
    return Finding("problem", about, text, fix)


@dataclass
class HostReport:
    """What was found on one host.

    Attributes:
        facts: what ought to be the same on all hosts (versions, files), by name.
        address: of the interface that NCCL and Gloo should use, 'eth0 10.0.0.5/24'; empty where there is none.
        clock: what it showed at a moment that was the same for all hosts, in seconds since a time that is the same for all.
    """

    host: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    address: str = ""
    clock: float | None = None


def merged(reports: Sequence[HostReport]) -> list[tuple[Finding, list[str]]]:
    """Every finding once, in the order of the first host that has it, with the hosts that have it."""
    hosts: dict[Finding, list[str]] = {}
    for report in reports:
        for finding in report.findings:
            hosts.setdefault(finding, []).append(report.host)
    return list(hosts.items())


def lines(reports: Sequence[HostReport]) -> list[str]:
    """The report: of several hosts each finding once, and where it holds if that is not everywhere.

    >>> for line in lines([HostReport("h1", [ok("clock", "right")]), HostReport("h2", [problem("disk", "full", "delete")])]):
    ...     print(line)
    ok       h1: clock: right
    problem  h2: disk: full (delete)
    """
    text = []
    for finding, hosts in merged(reports):
        where = f"{', '.join(hosts)}: " if len(hosts) < len(reports) else ""
        hint = f" ({finding.fix})" if finding.fix else ""
        text.append(f"{finding.level:8} {where}{finding.about}: {finding.text}{hint}")
    return text


def summary(findings: Iterable[Finding]) -> str:
    """How many of each level.

    >>> summary([ok("a", "b"), problem("c", "d", "e"), ok("f", "g")])
    '1 problem, 0 warnings, 2 ok'
    """
    levels = [finding.level for finding in findings]
    problems, warnings = levels.count("problem"), levels.count("warning")
    counted = [f"{problems} problem{'' if problems == 1 else 's'}", f"{warnings} warning{'' if warnings == 1 else 's'}"]
    return ", ".join([*counted, f"{levels.count('ok')} ok"])
