"""Other hosts, before anything is started there: name, ssh, clock, free ports, and their own report."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdtrain.doctor.findings import Finding, HostReport, ok, problem, warning
from hvdtrain.doctor.packages import environment_alone, output
from hvdtrain.doctor.ranks import cannot_connect

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]

SLOW = 3.0
"""Seconds for a login: mpirun has many to do."""

LISTEN = """
import socket
with socket.socket() as listener:
    listener.bind(("", 0)); listener.listen(); listener.settimeout(20)
    print(listener.getsockname()[1], flush=True)
    try: listener.accept()[0].close()
    except OSError: pass
"""
"""Listens on a free port of the other host until somebody connects."""


def ask_hosts(hosts: Sequence[str], command: Sequence[str]) -> tuple[list[HostReport], list[Finding]]:
    """Log in to every host, all at once, and let the doctor look at it from there.

    Args:
        command: what to run there: this program with its arguments, for JSON.

    Returns:
        The reports of the hosts that gave one, and what was found on the way.
    """
    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = list(pool.map(lambda host: ask_host(host, command), hosts))
    return [report for report, _ in answers if report is not None], [finding for _, findings in answers for finding in findings]


def ask_host(host: str, command: Sequence[str]) -> tuple[HostReport | None, list[Finding]]:
    """One host."""
    about = f"ssh {host}"
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        address = ""
        named = str(error)
    before = time.time()
    status, said = output([*SSH, host, "date +%s.%N"], seconds=15)
    after = time.time()
    if status != 0:
        if not address and "resolve" in said:
            return None, [
                problem(about, f"expected the name of a host, got {host}: {named}", "/etc/hosts, DNS, or ~/.ssh/config")
            ]
        return None, [problem(about, f"expected to log in without a password, got: {_last(said)}", _cure(said, host))]
    seconds = after - before
    clock_ahead = surely_ahead(float(said.split()[-1]), before, after)
    findings = [ok(about, f"logged in within {seconds:.1f} s")]
    if seconds > SLOW:
        findings = [warning(about, f"a login takes {seconds:.1f} s", "UseDNS no in its sshd_config; a shorter ~/.bashrc")]
    if address:
        findings += check_port(host, address)
    here = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join([sys.executable, *command])}"
    status, said = output([*SSH, host, here], seconds=180)
    start = said.find('[{"host"')
    if start < 0:
        text = f"expected `{sys.executable} -m hvdtrain doctor` to run there, in {Path.cwd()}, got: {_last(said)}"
        return None, [*findings, problem(about, text, "the same environment and folder on all hosts, or a shared file system")]
    values = json.JSONDecoder().raw_decode(said[start:])[0][0]
    report = HostReport(**values | {"findings": [Finding(**each) for each in values["findings"]]})
    report.clock = clock_ahead
    return report, findings


def surely_ahead(clock: float, before: float, after: float) -> float:
    """How far another clock is ahead at least (behind: negative), if it was read at some time between two moments.

    >>> surely_ahead(103.0, before=100.0, after=102.0), surely_ahead(101.9, before=100.0, after=102.0)
    (1.0, 0.0)
    """
    return max(0.0, clock - after) + min(0.0, clock - before)


def check_port(host: str, address: str) -> list[Finding]:
    """Whether a port that a program takes there can be reached from here: MPI, Gloo and NCCL all take whichever is free."""
    listener = subprocess.Popen(
        [*SSH, host, shlex.join([sys.executable, "-c", LISTEN])],
        env=environment_alone(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        port = (listener.stdout.readline() if listener.stdout else "").strip()
        if not port.isdigit():
            return []  # no Python there: the report tells more
        error = cannot_connect(address, int(port))
    finally:
        listener.kill()
        listener.wait()
    if error:
        fix = "open the firewall between the hosts for the ports that programs take"
        return [problem(f"ports of {host}", f"expected to reach {address} on port {port}, got: {error}", fix)]
    return [ok(f"ports of {host}", f"{address} is reached on a free port")]


def _last(said: str) -> str:
    return said.strip().splitlines()[-1] if said.strip() else "no answer"


def _cure(said: str, host: str) -> str:
    if "Host key" in said:
        return f"log in once by hand (ssh {host}), or StrictHostKeyChecking accept-new in ~/.ssh/config"
    if "Permission denied" in said:
        return f"ssh-copy-id {host}"
    return "is the host up, does sshd run there, is a firewall in between?"
