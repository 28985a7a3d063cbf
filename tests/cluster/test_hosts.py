"""The hosts themselves: what happens on them stays there, and they end with the tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster.hosts import Hosts

STARTER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from cluster.hosts import Hosts
hosts = Hosts(Path(sys.argv[2]), 2).__enter__()
hosts.start("sleep 600", host="host2")
print(Path(f"/proc/{hosts._init}/ns/pid").readlink(), flush=True)
time.sleep(600)
"""


def test_hosts_have_separate_names_addresses_and_memory(hosts: Hosts) -> None:
    before = {place: set(os.listdir(place)) for place in ("/dev/shm", "/run")}
    for name in hosts.names:
        told = hosts.run("hostname; hostname -I; ls /dev/shm; touch /dev/shm/trace; ssh host1 hostname", host=name).out
        assert told.split() == [name, hosts.address(name), "host1"]
    assert {place: set(os.listdir(place)) for place in before} == before
    assert hosts.address("host1") not in Path("/etc/hosts").read_text()


def test_a_cable_can_be_pulled_and_plugged_again(hosts: Hosts) -> None:
    reach = f"timeout 2 bash -c 'exec 3<>/dev/tcp/{hosts.address('host2')}/22'"
    assert hosts.run(reach, host="host1").status == 0
    hosts.pull_cable("host2")
    assert hosts.run(reach, host="host1").status != 0
    hosts.plug_cable("host2")
    assert hosts.run(reach, host="host1").status == 0


def test_everything_ends_even_if_the_tests_are_killed(hosts: Hosts, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(Path(__file__).parent.parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        space = starter.stdout.readline().strip()
        assert space.startswith("pid:[")
        assert len(processes_of(space)) >= 6
        starter.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while processes_of(space):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(space: str) -> list[str]:
    """The processes in a process namespace."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "ns" / "pid").readlink()) == space:
                found.append(process.name)
        except OSError:  # it has just ended
            pass
    return found
