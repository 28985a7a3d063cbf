"""All checks of one host, in the order of the report."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.comm import launch
from hvdtrain.doctor import cores, gpu, mpi, network, packages, resources
from hvdtrain.doctor.compare import of_environment
from hvdtrain.doctor.config import check_data, fingerprints, hdf_files, read_config
from hvdtrain.doctor.environment import check_environment
from hvdtrain.doctor.findings import Finding, HostReport
from hvdtrain.doctor.interfaces import read_interfaces
from hvdtrain.settings import Settings


@dataclass(frozen=True)
class Job:
    """What is going to run, as far as it is known.

    Attributes:
        configs: files; none: only the host is looked at.
        ranks: in all; local_ranks: on this host.
        launcher: who started this process, as comm/launch.py names it; None: nobody.
        several_hosts: whether other hosts will take part.
    """

    configs: list[Path]
    overrides: dict[str, str]
    ranks: int
    local_ranks: int
    launcher: str | None
    several_hosts: bool


def examine(job: Job) -> tuple[HostReport, Settings | None]:
    """Look at this host, and at the config from here."""
    environ = launch.environment()
    settings, of_config = read_config(job.configs, job.overrides) if job.configs else (None, [])
    framework = settings.run.backend if settings else None
    use_horovod = settings is not None and settings.reduce.use_horovod
    probes = packages.start_probes(framework)  # they take seconds: everything else is asked meanwhile
    libraries = mpi.versions()
    gpus, of_gpus = gpu.check_gpus(environ, job.local_ranks)
    interfaces = read_interfaces()
    files = hdf_files(settings) if settings else []
    findings = packages.check_packages(framework, use_horovod)
    before = [
        *mpi.check_mpi(libraries, job.launcher),
        *mpi.check_srun(),
        *of_gpus,
        *check_environment(environ),
        *network.check_interfaces(environ, interfaces, job.several_hosts),
        network.check_name(socket.gethostname(), job.several_hosts),
        *network.check_master(environ, is_master=job.launcher is None),
        *network.check_ports(),
        *cores.check_cores(environ, sorted(os.sched_getaffinity(0)), os.cpu_count() or 1, cores.container_quota()),
        resources.check_shared_memory(job.local_ranks, len(gpus)),
        *resources.check_memory(),
        *resources.check_limits(len(files), len(gpus), infiniband=any(Path("/sys/class/infiniband").glob("*"))),
        *check_disks(settings, Path(environ.get("TMPDIR") or tempfile.gettempdir())),
        *of_config,
        *(check_data(settings, job.ranks) if settings else []),
    ]
    for name, probe in probes.items():
        findings += packages.check_horovod(name, probe, use_horovod, len(gpus))
    facts = packages.facts()
    facts |= {f"MPI of {name}": what for name, what in libraries.items()}
    facts |= {"cores": str(os.cpu_count()), "GPUs": ", ".join(each.name for each in gpus) or "none"}
    facts |= {"driver": gpus[0].driver} if gpus else {}
    facts |= of_environment(environ) | fingerprints(job.configs, settings)
    host = socket.gethostname()
    return HostReport(host, [*findings, *before], facts, network.own_address(environ, interfaces)), settings


def check_disks(settings: Settings | None, temporary: Path) -> list[Finding]:
    """Where checkpoints and temporary files go."""
    findings = []
    if settings is not None:
        findings.append(resources.check_disk(Path(settings.run.model).parent, "disk for checkpoints"))
    findings.append(resources.check_disk(temporary, "disk for temporary files", 100 * resources.MEGABYTE))
    return findings


def job_of(configs: list[Path], overrides: Mapping[str, str], other_hosts: int) -> Job:
    """What this process's launcher and command line say about the job."""
    started = launch.launch()
    several = other_hosts > 0 or started.size > started.local_size
    return Job(configs, dict(overrides), started.size, started.local_size, started.launcher, several)
