"""Connecting Horovod's ranks over Gloo without horovodrun.

Under plain `srun`, or under mpirun if HOROVOD_CONTROLLER is gloo: Horovod's Gloo controller supports neither Slurm nor MPI.
Started by them, it silently makes every process a job of size 1, or crashes. So each process derives the environment variables
that horovodrun would set, and rank 0 runs the rendezvous server through which Gloo's processes find each other
(`gloo_environment`).
"""

from __future__ import annotations

import array
import fcntl
import re
import socket
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.comm.launchers import Place, detect
from hvdtrain.comm.mpi import world
from hvdtrain.comm.slurm import host_names, tasks_per_node
from hvdtrain.errors import LaunchError
from hvdtrain.plugins.horovod.elastic import request

RENDEZVOUS_TIMEOUT = 120.0
"""Seconds that the other ranks wait for rank 0."""

FIRST_PORT, NUM_PORTS, CHOICES = 12000, 20000, 8
"""Ports below the range that Linux uses for outgoing connections; a job tries CHOICES of them."""


@dataclass(frozen=True)
class Job:
    """The processes of a job, and which of them this one is.

    Attributes:
        name: identifies the job.
        node: the index of this process's host.
        hosts: the hosts, in the order of their ranks.
        tasks: the number of ranks on each host.
    """

    name: str
    rank: int
    local_rank: int
    node: int
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks are on one host. They then connect over the loopback address, which other hosts cannot reach."""
        return len(set(self.hosts)) == 1

    @property
    def ports(self) -> list[int]:
        """The ports on which rank 0 may listen: the same on all ranks of a job, and most likely different from another job's."""
        first = zlib.crc32(self.name.encode()) * CHOICES % NUM_PORTS
        return [FIRST_PORT + first + choice for choice in range(CHOICES)]

    @property
    def horovod(self) -> dict[str, str]:
        """The variables that horovodrun sets for this process."""
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


def gloo_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set before Horovod is initialized; empty if MPI or horovodrun connects the processes.

    Starts the rendezvous server on rank 0; the other ranks wait for it. Raises: LaunchError.
    """
    job = read_job(environ)
    if job is None:
        return {}
    if job.rank == 0:
        address = "127.0.0.1"
        port = serve(job)
    else:
        address = "127.0.0.1" if job.is_on_one_host else address_of(job.hosts[0])
        port = find(job, address)
    remote_host = next((host for host in job.hosts if host != job.hosts[job.node]), None)
    interface = "lo" if remote_host is None else interface_towards(address_of(remote_host))
    return {
        **job.horovod,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": environ.get("HOROVOD_GLOO_IFACE", interface),
    }


def read_job(environ: Mapping[str, str]) -> Job | None:
    """The job, if Gloo has to connect its processes and horovodrun did not set that up; otherwise None.

    Plain srun does not connect its tasks (with --mpi=pmix it does, and sets PMIX_RANK). If a user selects Gloo in either
    HOROVOD_CONTROLLER or HOROVOD_CPU_OPERATIONS, both are set to Gloo: an MPI controller with Gloo's operations crashes.

    Raises:
        LaunchError: Slurm's variables contradict each other, or HOROVOD_CONTROLLER selects MPI where MPI is not available.
    """
    place = detect(environ)
    requested = [environ[name] for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS") if name in environ]
    if place.size == 1:
        return None
    if place.launcher == "srun" and ("gloo" in requested or "PMIX_RANK" not in environ):
        if "mpi" in requested:
            raise LaunchError("HOROVOD_CONTROLLER: expected gloo under plain srun, got mpi (for MPI: srun --mpi=pmix)")
        return _job_of_srun(environ, place)
    if place.launcher == "mpirun" and "gloo" in requested:
        return _job_of_mpirun(environ, place)
    return None


def _job_of_srun(environ: Mapping[str, str], place: Place) -> Job:
    hosts = host_names(environ.get("SLURM_STEP_NODELIST", ""))
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(hosts) != len(tasks) or sum(tasks) != place.size:
        raise LaunchError(
            f"srun: expected SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE for {place.size} tasks, got "
            f"{environ.get('SLURM_STEP_NODELIST')!r} and {environ.get('SLURM_STEP_TASKS_PER_NODE')!r}"
        )
    name = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    return Job(name, place.rank, place.local_rank, int(environ.get("SLURM_NODEID", "0")), tuple(hosts), tuple(tasks))


def _job_of_mpirun(environ: Mapping[str, str], place: Place) -> Job:
    """Collective. mpi4py is used only to gather the host names."""
    names = world(place).allgather(socket.gethostname())
    hosts = tuple(dict.fromkeys(names))
    tasks = tuple(names.count(host) for host in hosts)
    name = environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or ""
    return Job(name, place.rank, place.local_rank, hosts.index(socket.gethostname()), hosts, tasks)


def serve(job: Job) -> int:
    """Run Horovod's rendezvous server in a thread until this process ends; return its port. Raises: LaunchError."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    for port in job.ports:
        try:
            server = RendezvousHTTPServer(("127.0.0.1" if job.is_on_one_host else "", port), RendezvousHandler, False)
        except OSError:  # the port is in use
            continue
        hosts = [HostInfo(host, tasks) for host, tasks in zip(job.hosts, job.tasks, strict=True)]
        server.init(get_host_assignments(hosts, sum(job.tasks)))
        server.cache["hvdtrain"] = {"job": job.name.encode()}  # lets the other ranks check that it is their job's server
        threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
        return port
    raise LaunchError(
        f"Horovod over Gloo: expected a free port among {job.ports[0]} to {job.ports[-1]} on {job.hosts[0]}, got none"
    )


def find(job: Job, address: str, timeout: float = RENDEZVOUS_TIMEOUT) -> int:
    """The port of rank 0's rendezvous server. Raises: LaunchError, if it does not answer."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for port in job.ports:
            answer = request(address, port, "GET", "/hvdtrain/job", None, timeout=5)
            if answer is not None and answer[1] == job.name.encode():
                return port
        time.sleep(0.1)
    raise LaunchError(
        f"Horovod over Gloo: expected rank 0 on {job.hosts[0]} ({address}) to answer on a port from {job.ports[0]} to "
        f"{job.ports[-1]}, got no answer for {timeout:g} s (did rank 0 fail, or does a firewall block the port? MPI needs none)"
    )


def address_of(host: str) -> str:
    """A host's IPv4 address: from the resolver, otherwise from Slurm. Raises: LaunchError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        try:
            node = subprocess.run(["scontrol", "show", "node", host], capture_output=True, text=True, timeout=30).stdout
            if (node_address := re.search(r"NodeAddr=(\S+)", node)) is not None:
                return socket.gethostbyname(node_address[1])
        except (OSError, subprocess.TimeoutExpired):
            pass
        raise LaunchError(f"Horovod over Gloo: expected a host name that can be resolved, got {host!r}: {error}") from None


def interface_towards(address: str) -> str:
    """The network interface that packets to this address leave through. Raises: LaunchError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        local = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            interface = array.array("B", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe.fileno(), 0x8915, interface)  # SIOCGIFADDR: the interface's IPv4 address, at byte 20
            except OSError:  # the interface has no IPv4 address
                continue
            if interface.tobytes()[20:24] == local:
                return name
    raise LaunchError(f"Horovod over Gloo: expected a network interface towards {address}, got none (set HOROVOD_GLOO_IFACE)")
