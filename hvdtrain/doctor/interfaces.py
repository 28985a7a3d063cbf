"""Network interfaces, and which of them NCCL picks."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
IS_UP = 0x1

OF_ONE_HOST = ("lo", "docker", "virbr", "vmnet", "vboxnet", "veth", "br-", "cni", "flannel")
"""Beginnings of names of interfaces that lead to no other host."""

WIRELESS = ("wl", "ww", "ppp")
"""Beginnings of names of interfaces that are slow."""


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        address: '10.0.0.5/24', or an IPv6 address where there is no other; None: it has none.
    """

    name: str
    address: str | None
    up: bool = True

    @property
    def leads_out(self) -> bool:
        """Whether other hosts might be reached through it, going by its name."""
        return not self.name.startswith(OF_ONE_HOST)

    def __str__(self) -> str:
        return f"{self.name} {self.address or 'without address'}{'' if self.up else ' (down)'}"


def matches(name: str, pattern: str) -> bool:
    """Whether an interface's name is one of those that NCCL_SOCKET_IFNAME means, by NCCL's rules.

    Beginnings of names, separated by commas; after `=` whole names; after `^` all but those; `^=` both.

    >>> matches("eth0", "eth,em"), matches("eth0", "=eth"), matches("eth0", "^docker,lo"), matches("docker0", "^=docker")
    (True, False, True, True)
    """
    wanted = True
    if pattern.startswith("^"):
        pattern, wanted = pattern[1:], False
    exact = pattern.startswith("=")
    names = [part.split(":")[0] for part in pattern.removeprefix("=").split(",") if part]
    return any(name == other if exact else name.startswith(other) for other in names) == wanted


def nccl_picks(setting: str | None, interfaces: Sequence[Interface]) -> list[Interface]:
    """The interfaces that NCCL uses, in its order; connections are made over the first.

    Without a setting (or with one of less than two characters, which NCCL takes for none): InfiniBand's, else all but docker
    and lo, else docker's, else lo.

    >>> found = [Interface("lo", "127.0.0.1/8"), Interface("docker0", "172.17.0.1/16"), Interface("eth0", "10.0.0.5/24")]
    >>> [[each.name for each in nccl_picks(setting, found)] for setting in (None, "^docker", "eth1", "=eth0")]
    [['eth0'], ['lo', 'eth0'], [], ['eth0']]
    """
    usable = [each for each in interfaces if each.up and each.address]
    for pattern in [setting] if setting and len(setting) > 1 else ["ib", "^docker,lo", "docker", "lo"]:
        picked = [each for each in usable if matches(each.name, pattern)]
        if picked:
            return picked
    return []


def read_interfaces() -> list[Interface]:
    """This host's interfaces in the kernel's order, which is the one NCCL sees."""
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
    """An interface's IPv6 address that other hosts can use."""
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, _, prefix, scope, _, owner = line.split()
        if owner == name and scope == "00":
            return str(ipaddress.ip_interface((bytes.fromhex(digits), int(prefix, 16))))
    return None
