"""Horovod under plain `srun`, without MPI: what horovodrun would have told the processes comes from SLURM_*.

Horovod's Gloo controller knows no Slurm: left alone it makes every task a job of size 1, without a word. So each task works
out its place from SLURM_*, and task 0 serves the rendezvous at which Gloo's processes find each other.
"""

from __future__ import annotations

import array
import fcntl
import http.client
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.comm.launch import detect
from hvdtrain.comm.slurm import host_names, tasks_per_node
from hvdtrain.errors import LaunchError

PATIENCE = 120.0
"""Seconds that the other tasks wait for task 0."""

FIRST_PORT, NUM_PORTS, CHOICES = 12000, 20000, 8
"""Ports outside the range from which Linux takes those of outgoing connections; a step tries a few of them."""


@dataclass(frozen=True)
class Step:
    """A job step of Slurm as one of its tasks sees it."""

    name: str
    rank: int
    local_rank: int
    node: int
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]

    @property
    def ports(self) -> list[int]:
        """Where task 0 may serve: the same for all tasks of the step, others for other steps."""
        job, _, step = self.name.partition(".")
        first = (int(job) * 31 + int(step) * 7) * CHOICES % NUM_PORTS
        return [FIRST_PORT + first + choice for choice in range(CHOICES)]

    @property
    def horovod(self) -> dict[str, str]:
        """What horovodrun tells a process about its place."""
        across = [node for node, tasks in enumerate(self.tasks) if tasks > self.local_rank]
        return {
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(sum(self.tasks)),
            "HOROVOD_LOCAL_RANK": str(self.local_rank),
            "HOROVOD_LOCAL_SIZE": str(self.tasks[self.node]),
            "HOROVOD_CROSS_RANK": str(across.index(self.node)),
            "HOROVOD_CROSS_SIZE": str(len(across)),
            "HOROVOD_HOSTNAME": self.hosts[self.node],
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }


def read_step(environ: Mapping[str, str]) -> Step | None:
    """The step of several tasks that plain srun started this process in. None: there is none, or MPI connects the tasks
    (srun --mpi=pmix sets PMIX_RANK, and mpirun inside a step is the launcher itself).

    Raises:
        LaunchError: Slurm's variables contradict each other, or HOROVOD_CONTROLLER asks for MPI.
    """
    started = detect(environ)
    if started.launcher != "srun" or started.size == 1 or "PMIX_RANK" in environ:
        return None
    if environ.get("HOROVOD_CONTROLLER", "gloo") != "gloo":
        raise LaunchError(
            f"HOROVOD_CONTROLLER: expected gloo under plain srun, got {environ['HOROVOD_CONTROLLER']} (for MPI: srun --mpi=pmix)"
        )
    hosts = host_names(environ.get("SLURM_STEP_NODELIST", ""))
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(hosts) != len(tasks) or sum(tasks) != started.size:
        raise LaunchError(
            f"srun: expected SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE for {started.size} tasks, got "
            f"{environ.get('SLURM_STEP_NODELIST')!r} and {environ.get('SLURM_STEP_TASKS_PER_NODE')!r}"
        )
    return Step(
        name=f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}",
        rank=started.rank,
        local_rank=started.local_rank,
        node=int(environ.get("SLURM_NODEID", "0")),
        hosts=tuple(hosts),
        tasks=tuple(tasks),
    )


def gloo_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What has to stand in the environment before Horovod starts; nothing unless plain srun started several tasks.

    Task 0 serves the rendezvous from here on; the others wait for it. Raises: LaunchError.
    """
    step = read_step(environ)
    if step is None:
        return {}
    if step.rank == 0:
        address, port = "127.0.0.1", serve(step)
    else:
        address = address_of(step.hosts[0])
        port = find(step, address)
    other = next((host for host in step.hosts if host != step.hosts[step.node]), None)
    interface = "lo" if other is None else interface_towards(address_of(other))
    return {
        **step.horovod,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": environ.get("HOROVOD_GLOO_IFACE", interface),
    }


def serve(step: Step) -> int:
    """Serve Horovod's rendezvous in the background, until this process ends; returns the port. Raises: LaunchError."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    for port in step.ports:
        try:
            server = RendezvousHTTPServer(("", port), RendezvousHandler, False)
        except OSError:  # taken by somebody else
            continue
        hosts = [HostInfo(host, tasks) for host, tasks in zip(step.hosts, step.tasks, strict=True)]
        server.init(get_host_assignments(hosts, sum(step.tasks)))
        server.cache["hvdtrain"] = {"step": step.name.encode()}  # by which the other tasks know that it is the right one
        threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
        return port
    raise LaunchError(
        f"srun: expected a free port among {step.ports[0]} to {step.ports[-1]} on {step.hosts[0]}, got none for the rendezvous"
    )


def find(step: Step, address: str, patience: float = PATIENCE) -> int:
    """The port at which task 0 serves. Raises: LaunchError, if it does not answer."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        for port in step.ports:
            if _ask(address, port) == step.name.encode():
                return port
        time.sleep(0.1)
    raise LaunchError(
        f"srun: expected task 0 on {step.hosts[0]} ({address}) to answer at a port of {step.ports[0]} to {step.ports[-1]}, "
        f"got no answer for {patience:g} s (did task 0 fail, or is there a firewall? srun --mpi=pmix needs no such port)"
    )


def _ask(address: str, port: int) -> bytes | None:
    """The name of the step that is served at a port, if any is."""
    connection = http.client.HTTPConnection(address, port, timeout=5)  # asks no proxy, as urllib would
    try:
        connection.request("GET", "/hvdtrain/step")
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def address_of(host: str) -> str:
    """A host's IPv4 address: by its name, or else as Slurm knows it. Raises: LaunchError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        try:
            told = subprocess.run(["scontrol", "show", "node", host], capture_output=True, text=True, timeout=30).stdout
            found = re.search(r"NodeAddr=(\S+)", told)
            if found is not None:
                return socket.gethostbyname(found[1])
        except (OSError, subprocess.TimeoutExpired):
            pass
        raise LaunchError(
            f"srun: expected a host name that can be resolved, got {host!r} from SLURM_STEP_NODELIST: {error}"
        ) from None


def interface_towards(address: str) -> str:
    """The network interface from which packets go to an address. Raises: LaunchError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR: the interface's IPv4 address, at byte 20
            except OSError:  # it has none
                continue
            if request.tobytes()[20:24] == own:
                return name
    raise LaunchError(f"srun: expected a network interface towards {address}, got none (HOROVOD_GLOO_IFACE names one)")
