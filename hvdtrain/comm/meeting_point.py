"""Where the processes of torch.distributed meet: `meeting_point` is a pure function of the environment and the config."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hvdtrain.comm.launchers import Place, detect
from hvdtrain.comm.slurm import host_names
from hvdtrain.errors import LaunchError


@dataclass(frozen=True)
class Address:
    """A port known in advance. Rank 0 listens on it; the others connect to the first of `hosts` that answers."""

    hosts: tuple[str, ...]
    port: int

    def __str__(self) -> str:
        return f"tcp://{_bracket(self.hosts[0])}:{self.port}"


@dataclass(frozen=True)
class Agent:
    """The store of torchrun's agent, which outlives its workers. Rank 0 posts there the port it listens on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"torchrun's store at {self.host}:{self.port}"


@dataclass(frozen=True)
class SharedFile:
    """A file that all ranks can read. Rank 0 writes to it the port it listens on."""

    path: Path

    def __str__(self) -> str:
        return f"file://{self.path}"


MeetingPoint = Address | Agent | SharedFile

FIRST_PORT = 20000
PORTS = 10000
"""Ports for jobs without MASTER_PORT: below those that Linux assigns to outgoing connections (32768 and above)."""

LOOPBACK = "127.0.0.1"
"""Where the processes of a job on one host connect: other hosts cannot reach it."""

HVDTRAIN_INIT_METHOD = "HVDTRAIN_INIT_METHOD"
"""The variable with the rendezvous address of processes that hvdtrain itself started."""

FORMS = "'env://', 'tcp://HOST:PORT' or 'file:///PATH'"


def meeting_point(environ: Mapping[str, str], place: Place, init_method: str | None = None) -> MeetingPoint | None:
    """The rendezvous of a job; None if neither the config nor the environment determines it.

    In this order: `init_method`; MASTER_ADDR and MASTER_PORT, which torchrun sets, too; the launcher's variables. A step of
    srun uses its first node, and mpirun on a single host uses that host, both with a port derived from the job's id.

    Raises:
        LaunchError: `init_method` has an unknown form, or MASTER_PORT is not a number.
    """
    if init_method is not None and init_method != "env://":
        return parse(init_method)
    if place.launcher == "hvdtrain":
        if HVDTRAIN_INIT_METHOD in environ:
            return parse(environ[HVDTRAIN_INIT_METHOD])
        place = detect({name: value for name, value in environ.items() if not name.startswith("HVDTRAIN_")})
    port = _master_port(environ) or _port_of_job(environ, place)
    if "MASTER_ADDR" in environ and port is not None:
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Agent(environ["MASTER_ADDR"], port)
        return Address((environ["MASTER_ADDR"],), port)
    if init_method == "env://" or port is None:
        return None
    if place.local_size == place.size > 1:
        return Address((LOOPBACK,), port)
    if place.launcher == "srun":
        return Address(_slurm_hosts(environ), port)
    return None


def parse(init_method: str) -> Address | SharedFile:
    """Parse `tcp://host:port` or `file://path`, the forms that torch.distributed accepts.

    >>> parse("tcp://node1:29500"), str(parse("file:///shared/meet"))
    (Address(hosts=('node1',), port=29500), 'file:///shared/meet')

    Raises:
        LaunchError: it has another form.
    """
    parts = urlsplit(init_method)
    if parts.scheme == "file" and parts.netloc + parts.path:
        return SharedFile(Path(parts.netloc + parts.path))
    try:
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return Address((parts.hostname,), parts.port)
    except ValueError:
        pass  # the port is not a number
    raise LaunchError(f"init_method: expected {FORMS}, got {init_method!r}")


def _slurm_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The first node of the step, where task 0 runs, and as a fallback if its name cannot be resolved, the address of the host on
    which srun was called: in a batch job, this is the first node, too.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    return (*host_names(nodes)[:1], *filter(None, [environ.get("SLURM_LAUNCH_NODE_IPADDR")]))


def _master_port(environ: Mapping[str, str]) -> int | None:
    text = environ.get("MASTER_PORT")
    if text is not None and not text.isdigit():
        raise LaunchError(f"MASTER_PORT: expected a number, got {text!r} in the environment")
    return None if text is None else int(text)


def _port_of_job(environ: Mapping[str, str], place: Place) -> int | None:
    """A port derived from the job's id: the same in all its processes, and most likely different from another job's."""
    names = {
        "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "mpirun": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"),
        "horovodrun": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    }
    job_ids = [environ[name] for name in names.get(place.launcher or "", ()) if name in environ]
    return FIRST_PORT + zlib.crc32(".".join(job_ids).encode()) % PORTS if job_ids else None


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
