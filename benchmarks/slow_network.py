"""Two hosts with a slow network between them, on one machine: namespaces with a host name and an address each, for networks.py.

The network between them is a process, which reads the packets of one host and hands them to the other as late as the rate and
the delay demand. (Linux has netem for this, but not every kernel.) Nothing outside the namespaces changes, and nothing remains
when this program ends. It needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

HOSTS = {"host1": "10.78.0.1", "host2": "10.78.0.2"}

INIT = """\
set -e
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount --bind {hosts} /etc/hosts
ip link set lo up
echo ready
exec cat >/dev/null  # until this program closes the pipe, or ends
"""

CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000

PACKET = 9000
"""The bytes of a packet. A rate of more than 1 Gbit/s needs larger ones, as each costs some microseconds."""


class SlowNetwork:
    """The two hosts and their network. A context manager.

    Args:
        rate: bits per second, in each direction.
        delay: seconds that a packet travels, in each direction.
    """

    def __init__(self, rate: float, delay: float) -> None:
        self._rate = rate
        self._delay = delay

    def __enter__(self) -> SlowNetwork:
        if os.geteuid() != 0:
            raise SystemExit("networks.py: expected to be started by root, who may make namespaces, got another user")
        self._folder = tempfile.TemporaryDirectory()
        hosts = Path(self._folder.name, "hosts")
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in HOSTS.items()))
        self._hosts = {name: self._start_host(name, hosts) for name in HOSTS}
        pids = [str(host.pid) for host in self._hosts.values()]
        command = [sys.executable, __file__, *pids, str(self._rate), str(self._delay)]
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._relay.stdout is None or self._relay.stdout.readline() != "ready\n":
            self.__exit__()
            raise SystemExit(f"networks.py: the network did not start: status {self._relay.wait()}")
        return self

    def __exit__(self, *exception: object) -> None:
        for process in (self._relay, *self._hosts.values()):
            process.kill()
            process.wait()
        self._folder.cleanup()

    def start(self, host: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command on a host."""
        words = ["nsenter", "-t", str(self._hosts[host].pid), "-n", "-u", "-i", "-m", f"--wd={Path.cwd()}", "--", *command]
        given = {**os.environ, **environment, "GLOO_SOCKET_IFNAME": "eth0"}
        return subprocess.Popen(
            words, env=given, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @staticmethod
    def _start_host(name: str, hosts: Path) -> subprocess.Popen[str]:
        words = ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", INIT.format(name=name, hosts=hosts)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise SystemExit(f"networks.py: {name} did not start: status {process.wait()}")
        return process


class Direction:
    """The way from one host to the other."""

    def __init__(self, source: int, sink: int, rate: float, delay: float) -> None:
        self._source = source
        self._sink = sink
        self._rate = rate
        self._delay = delay
        self._free = 0.0  # when the packets so far have left
        self._waiting: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float | None:
        """When the next packet arrives."""
        return self._waiting[0][0] if self._waiting else None

    def take(self) -> None:
        """Take all packets that the source has."""
        while True:
            try:
                packet = os.read(self._source, 1 << 16)
            except BlockingIOError:
                return
            self._free = max(time.monotonic(), self._free) + 8 * len(packet) / self._rate
            self._waiting.append((self._free + self._delay, packet))

    def deliver(self) -> None:
        """Hand over what has arrived."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, packet = self._waiting.popleft()
            try:
                os.write(self._sink, packet)
            except BlockingIOError:
                pass  # lost; TCP repeats it


def open_device(pid: int, address: str, mtu: int) -> int:
    """Make the network device of a host; return the file of its packets."""
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    for words in (
        ["addr", "add", f"{address}/24", "dev", "eth0"],
        ["link", "set", "eth0", "mtu", str(mtu), "txqueuelen", "10000", "up"],
    ):
        subprocess.run(["ip", *words], check=True)
    return device


def relay(pids: Sequence[int], rate: float, delay: float) -> None:
    """Be the network, until the pipe from the starting program closes."""
    mtu = PACKET if rate <= 1e9 else 60000
    one, other = (open_device(pid, address, mtu) for pid, address in zip(pids, HOSTS.values(), strict=True))
    ways = {one: Direction(one, other, rate, delay), other: Direction(other, one, rate, delay)}
    print("ready", flush=True)
    while True:
        due = min((way.due for way in ways.values() if way.due is not None), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for readable in select.select([*ways, sys.stdin], [], [], wait)[0]:
            if readable is sys.stdin:
                return
            ways[readable].take()
        for way in ways.values():
            way.deliver()


if __name__ == "__main__":
    relay([int(pid) for pid in sys.argv[1:3]], float(sys.argv[3]), float(sys.argv[4]))
