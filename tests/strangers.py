"""Datagrams of strangers: whatever somebody may send to a port on which the watchdogs listen."""

import json
import random
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.plugins.watchdog.peers import LOOPBACK, sign

LONGEST = 65507
"""Bytes of a datagram."""


def hostile(generator: random.Random, recorded: Sequence[bytes] = ()) -> bytes:
    """A datagram that is not the job's own, or was recorded: as it was, changed, cut off or made longer."""
    claims = [generator.randrange(3), 10**9, generator.choice(["ended", "failed", None, {"idle": "none"}])]
    made = [
        lambda: generator.choice([b"[", b'{"":', b"[[", b"-", b"\xff"]) * generator.choice([1, 2000, 30_000 // 4]),
        lambda: generator.randbytes(generator.choice([0, 1, 31, 32, 33, generator.randrange(2000), LONGEST])),
        lambda: generator.randbytes(32) + b"[" * 20_000,
        lambda: bytes(32) + json.dumps(claims).encode(),
        lambda: json.dumps([secrets.token_hex(8), *claims]).encode(),
        lambda: sign(generator.choice(["", "token", secrets.token_hex()]), json.dumps(claims).encode()),
    ]
    if recorded:
        known = bytearray(generator.choice(recorded))
        place = generator.randrange(len(known))
        flipped = known[:place] + bytes([known[place] ^ (1 << generator.randrange(8))]) + known[place + 1 :]
        made += [
            lambda: bytes(known),
            lambda: bytes(flipped),
            lambda: bytes(known[:place]),
            lambda: bytes(known) + generator.randbytes(1 + generator.randrange(9)),
            lambda: bytes(known[:32]) + json.dumps(claims).encode(),
        ]
    return generator.choice(made)()


def sockets(folder: Path) -> set[tuple[str, int]]:
    """The addresses of the UDP sockets of all processes whose command line speaks of a folder.

    Sockets that are connected, such as one that asks a name server, take datagrams from nobody else.
    """
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder) in (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                inodes |= {link.readlink().name for link in (process / "fd").iterdir()}
    found = set()
    for line in Path("/proc/net/udp").read_text().splitlines()[1:]:
        parts = line.split()
        if f"socket:[{parts[9]}]" in inodes and parts[2] == "00000000:0000":
            host, port = parts[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


@contextmanager
def strangers(folder: Path, generator: random.Random) -> Iterator[set[tuple[str, int]]]:
    """Meanwhile, send hostile datagrams to all UDP sockets of a job; the addresses to which some were sent."""
    ends = threading.Event()
    reached: set[tuple[str, int]] = set()

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            while not ends.wait(0.2):
                for host, port in sockets(folder):
                    for _ in range(10):
                        with suppress(OSError):
                            udp.sendto(hostile(generator), (LOOPBACK, port))
                    reached.add((host, port))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield reached
    finally:
        ends.set()
        thread.join()
