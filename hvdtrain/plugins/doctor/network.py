"""Network interfaces, host names and ports, through which ranks of several hosts connect; and other hosts over ssh."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import shlex
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.plugins.doctor.findings import Finding, HostReport, ok, problem, warning
from hvdtrain.plugins.doctor.packages import environment_alone, output

SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
IS_UP = 0x1
"""Requests and a flag of netdevice(7)."""

OF_ONE_HOST = ("lo", "docker", "virbr", "vmnet", "vboxnet", "veth", "br-", "cni", "flannel")
"""Prefixes of the names of interfaces that do not connect to other hosts."""

WIRELESS = ("wl", "ww", "ppp")
"""Prefixes of the names of slow interfaces."""


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        address: '10.0.0.5/24', or an IPv6 address if it has no other; None: no address.
    """

    name: str
    address: str | None
    up: bool = True

    @property
    def leads_out(self) -> bool:
        """Whether its name suggests that it connects to other hosts."""
        return not self.name.startswith(OF_ONE_HOST)

    def __str__(self) -> str:
        return f"{self.name} {self.address or 'without address'}{'' if self.up else ' (down)'}"


def read_interfaces() -> list[Interface]:
    """This host's interfaces in the kernel's order, in which NCCL sees them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:

        def ask(request: int, name: str) -> bytes:
            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))

        return [_interface(name, ask) for _, name in socket.if_nameindex()]


def _interface(name: str, ask: Callable[[int, str], bytes]) -> Interface:
    up = bool(struct.unpack("16xH", ask(SIOCGIFFLAGS, name)[:18])[0] & IS_UP)
    try:
        address = socket.inet_ntoa(ask(SIOCGIFADDR, name)[20:24])
        mask = socket.inet_ntoa(ask(SIOCGIFNETMASK, name)[20:24])
    except OSError:  # it has no IPv4 address
        return Interface(name, _ipv6(name), up)
    return Interface(name, str(ipaddress.ip_interface(f"{address}/{mask}")), up)


def _ipv6(name: str) -> str | None:
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, _, prefix, scope, _, owner = line.split()
        if owner == name and scope == "00":
            return str(ipaddress.ip_interface((bytes.fromhex(digits), int(prefix, 16))))
    return None


def matches(name: str, pattern: str) -> bool:
    """Whether a value of NCCL_SOCKET_IFNAME selects an interface, by NCCL's rules.

    Prefixes of names, separated by commas; `=` before them: whole names; `^`: all interfaces but those; `^=`: both.

    >>> matches("eth0", "eth,em"), matches("eth0", "=eth"), matches("eth0", "^docker,lo"), matches("docker0", "^=docker")
    (True, False, True, True)
    """
    wanted = True
    if pattern.startswith("^"):
        pattern = pattern[1:]
        wanted = False
    exact = pattern.startswith("=")
    names = [entry.split(":")[0] for entry in pattern.removeprefix("=").split(",") if entry]
    return any(name == listed if exact else name.startswith(listed) for listed in names) == wanted


def nccl_picks(setting: str | None, interfaces: Sequence[Interface]) -> list[Interface]:
    """The interfaces that NCCL uses, in its order; connections are made over the first.

    Without a setting (or with one of a single character, which NCCL ignores): InfiniBand's, else all but docker and lo, else
    docker's, else lo.

    >>> found = [Interface("lo", "127.0.0.1/8"), Interface("docker0", "172.17.0.1/16"), Interface("eth0", "10.0.0.5/24")]
    >>> [[interface.name for interface in nccl_picks(setting, found)] for setting in (None, "^docker", "eth1", "=eth0")]
    [['eth0'], ['lo', 'eth0'], [], ['eth0']]
    """
    usable = [interface for interface in interfaces if interface.up and interface.address]
    for pattern in [setting] if setting and len(setting) > 1 else ["ib", "^docker,lo", "docker", "lo"]:
        picked = [interface for interface in usable if matches(interface.name, pattern)]
        if picked:
            return picked
    return []


def nccl_address(environ: Mapping[str, str], interfaces: Sequence[Interface]) -> str:
    """The interface that NCCL would use, as 'eth0 10.0.0.5/24'; '' if there is none."""
    picked = nccl_picks(environ.get("NCCL_SOCKET_IFNAME"), interfaces)
    return f"{picked[0].name} {picked[0].address}" if picked else ""


ONE_NAME = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables with whole names of interfaces, separated by commas."""

NAMES_OR_NETWORKS = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")
"""Variables with names of interfaces or networks (10.0.0.0/24), separated by commas."""


def check_interfaces(environ: Mapping[str, str], interfaces: Sequence[Interface], several_hosts: bool) -> list[Finding]:
    """Which interface NCCL picks, and whether the interfaces that other variables name exist.

    Args:
        several_hosts: whether the ranks are on several hosts; if so, an interface that does not connect to other hosts is a
            problem.
    """
    findings = [ok("interfaces", ", ".join(map(str, interfaces)))] if interfaces else []
    findings.append(check_nccl(environ.get("NCCL_SOCKET_IFNAME"), interfaces, several_hosts))
    names = [interface.name for interface in interfaces]
    fix = "name one that all hosts have, or a network such as 10.0.0.0/24 for mpirun"
    for variable in (*ONE_NAME, *NAMES_OR_NETWORKS):
        for wanted in filter(None, environ.get(variable, "").split(",")):
            is_network = "/" in wanted and variable in NAMES_OR_NETWORKS
            if not (_is_in_network(wanted, interfaces) if is_network else wanted in names):
                text = f"expected an interface of this host ({', '.join(names)}), got {wanted}"
                findings.append(problem(variable, text, fix))
    return findings


def _is_in_network(network: str, interfaces: Sequence[Interface]) -> bool:
    try:
        wanted = ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
    return any(interface.address and ipaddress.ip_interface(interface.address).ip in wanted for interface in interfaces)


def check_nccl(setting: str | None, interfaces: Sequence[Interface], several_hosts: bool) -> Finding:
    """Which interface NCCL would connect over, and whether that reaches the other hosts.

    >>> both = [Interface("lo", "127.0.0.1/8"), Interface("eth0", "10.0.0.5/24")]
    >>> check_nccl("^docker0", both, several_hosts=True).level, check_nccl(None, both, several_hosts=True).text
    ('problem', 'not set: NCCL connects over eth0 10.0.0.5/24')
    """
    about = "NCCL_SOCKET_IFNAME"
    value = repr(setting) if setting else "not set"
    picked = nccl_picks(setting, interfaces)
    better = [interface.name for interface in interfaces if interface.up and interface.address and interface.leads_out]
    fix = f"export NCCL_SOCKET_IFNAME={better[0]}" if better else "bring a network interface up"
    if not picked:
        names = ", ".join(interface.name for interface in interfaces)
        return problem(about, f"{value} picks none of {names}: NCCL finds no interface", fix)
    first = picked[0]
    over = f"{value}: NCCL connects over {first}"
    if len(picked) > 1:
        over += f", the first of {', '.join(interface.name for interface in picked)}"
    if not first.leads_out:
        if setting and setting.startswith("^") and first.name == "lo":
            fix = f"list lo, too: export NCCL_SOCKET_IFNAME={setting},lo"
        if several_hosts:
            return problem(about, f"{over}, which does not lead to other hosts", fix)
        if not better:
            return ok(about, f"{over}, on one host")
        return warning(about, f"{over}: enough for one host, not for several", fix)
    if first.name.startswith(WIRELESS):
        return warning(about, f"{over}, which is slow", f"{fix} if that is a cable" if better else "use a cable")
    return ok(about, over)


def check_name(name: str, several_hosts: bool) -> Finding:
    """Whether this host's name resolves to an address that other hosts can reach: Gloo publishes that address to them."""
    try:
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None)))
    except OSError as error:
        text = f"expected {name} to have an address, got: {error}"
        return problem("host name", text, f"add a line with {name} to /etc/hosts, or to DNS")
    if all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses):
        text = f"{name} is {', '.join(addresses)}, a loopback address, which other hosts cannot use"
        fix = f"give {name} its network address in /etc/hosts (usually Debian's line with 127.0.1.1 is the reason)"
        return problem("host name", text, fix) if several_hosts else ok("host name", f"{text}: enough for one host")
    return ok("host name", f"{name} is {', '.join(addresses)}")


def check_master(environ: Mapping[str, str], is_master: bool) -> list[Finding]:
    """Whether MASTER_ADDR resolves to an address, and rank 0 can listen on MASTER_PORT.

    Args:
        is_master: whether rank 0 will run on this host, and does not listen yet.
    """
    address = environ.get("MASTER_ADDR")
    port = environ.get("MASTER_PORT")
    findings = []
    if address:
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            text = f"expected the name or address of a host, got {address}: {error}"
            findings.append(problem("MASTER_ADDR", text, "rank 0's host"))
    if port and not (port.isdigit() and 0 < int(port) < 65536):
        findings.append(problem("MASTER_PORT", f"expected a port from 1 to 65535, got {port!r}", "export MASTER_PORT=29500"))
    elif port and is_master and port_is_taken(int(port)):
        fix = f"export MASTER_PORT={free_port()}, which is free"
        findings.append(problem("MASTER_PORT", f"{port} is in use by another program", fix))
    elif address or port:
        findings.append(ok("MASTER_ADDR, MASTER_PORT", f"{address or 'not set'}, {port or 'not set'}"))
    return findings


def port_is_taken(port: int) -> bool:
    """Whether another program listens on a port of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def free_port() -> int:
    """A port that is currently free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_ports() -> list[Finding]:
    """Whether enough ports are available: MPI, Gloo and NCCL listen on any free port."""
    try:
        first, last = map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split())  # noqa: SIM115
    except (OSError, ValueError):
        return []
    text = f"programs use {first} to {last}; a firewall between the hosts has to allow these"
    if last - first >= 1000:
        return [ok("ports", text)]
    return [warning("ports", text, "sysctl net.ipv4.ip_local_port_range='32768 60999'")]


SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]

SLOW = 3.0
"""A login that takes more than this many seconds is slow: mpirun needs one for each host."""

PATIENCE = 3.0
"""Seconds to wait for a connection to another host."""

LISTEN = """
import socket
with socket.socket() as listener:
    listener.bind(("", 0)); listener.listen(); listener.settimeout(20)
    print(listener.getsockname()[1], flush=True)
    try: listener.accept()[0].close()
    except OSError: pass
"""
"""Listens on a free port of the other host until a connection is made."""


def ask_hosts(hosts: Sequence[str], command: Sequence[str]) -> tuple[list[HostReport], list[Finding]]:
    """Log in to all hosts at once, and run the doctor on each of them.

    Args:
        command: the arguments of Python to run there: the doctor with its arguments, with output as JSON.

    Returns:
        The reports of the hosts that returned one, and the findings about the logins and connections.
    """
    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = list(pool.map(lambda host: ask_host(host, command), hosts))
    return [report for report, _ in answers if report is not None], [finding for _, findings in answers for finding in findings]


def ask_host(host: str, command: Sequence[str]) -> tuple[HostReport | None, list[Finding]]:
    """`ask_hosts` for one host."""
    about = f"ssh {host}"
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        address = ""
        lookup_error = str(error)
    before = time.time()
    status, said = output([*SSH, host, "date +%s.%N"], seconds=15)
    after = time.time()
    if status != 0:
        if not address and "resolve" in said:
            text = f"expected the name of a host, got {host}: {lookup_error}"
            return None, [problem(about, text, "/etc/hosts, DNS, or ~/.ssh/config")]
        return None, [problem(about, f"expected to log in without a password, got: {_last(said)}", _login_fix(said, host))]
    seconds = after - before
    clock_ahead = minimum_lead(float(said.split()[-1]), before, after)
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
    report = HostReport(**values | {"findings": [Finding(**fields) for fields in values["findings"]]})
    report.clock = clock_ahead
    return report, findings


def minimum_lead(clock: float, before: float, after: float) -> float:
    """The least seconds by which another clock is ahead (negative: behind), if it was read at some time between two moments.

    >>> minimum_lead(103.0, before=100.0, after=102.0), minimum_lead(101.9, before=100.0, after=102.0)
    (1.0, 0.0)
    """
    return max(0.0, clock - after) + min(0.0, clock - before)


def cannot_connect(address: str, port: int) -> str | None:
    """Why a port of another host cannot be reached, or None if it can."""
    try:
        socket.create_connection((address, port), timeout=PATIENCE).close()
        return None
    except OSError as error:
        return str(error)


def check_port(host: str, address: str) -> list[Finding]:
    """Whether a free port on that host can be reached from here: MPI, Gloo and NCCL listen on any free port."""
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
            return []  # no Python there: the doctor's report shows more
        error = cannot_connect(address, int(port))
    finally:
        listener.kill()
        listener.wait()
    if error:
        fix = "open the firewall between the hosts for the ports that programs use"
        return [problem(f"ports of {host}", f"expected to reach {address} on port {port}, got: {error}", fix)]
    return [ok(f"ports of {host}", f"{address} is reached on a free port")]


def _last(said: str) -> str:
    return said.strip().splitlines()[-1] if said.strip() else "no answer"


def _login_fix(said: str, host: str) -> str:
    if "Host key" in said:
        return f"log in once by hand (ssh {host}), or StrictHostKeyChecking accept-new in ~/.ssh/config"
    if "Permission denied" in said:
        return f"ssh-copy-id {host}"
    return "is the host up, does sshd run there, is a firewall in between?"
