"""All checks of one host, in the order of the report, with the config and its data."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.comm import launch
from hvdtrain.comm.base import SingleCommunicator
from hvdtrain.data.feed import feed_lines
from hvdtrain.doctor import mpi, network, packages, resources
from hvdtrain.doctor.environment import check_environment
from hvdtrain.doctor.findings import Finding, HostReport, of_environment, ok, problem, warning
from hvdtrain.doctor.network import read_interfaces
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.hdf_tools.check import check as check_file
from hvdtrain.session import open_feeds
from hvdtrain.settings import Settings, read_settings


@dataclass(frozen=True)
class Job:
    """The training that is planned, as far as it is known.

    Attributes:
        configs: files; none: only the host is checked.
        ranks: of the job.
        local_ranks: those on this host.
        launcher: what started this process, as comm/launch.py names it; None: no launcher.
        several_hosts: whether other hosts take part.
    """

    configs: list[Path]
    overrides: dict[str, str]
    ranks: int
    local_ranks: int
    launcher: str | None
    several_hosts: bool


def job_of(configs: list[Path], overrides: Mapping[str, str], other_hosts: int) -> Job:
    """The job as this process's launcher and command line describe it."""
    started = launch.launch()
    several = other_hosts > 0 or started.size > started.local_size
    return Job(configs, dict(overrides), started.size, started.local_size, started.launcher, several)


def examine(job: Job) -> tuple[HostReport, Settings | None]:
    """Run all checks on this host; return the report, and the config's settings if there are any."""
    environ = launch.environment()
    settings, of_config = read_config(job.configs, job.overrides) if job.configs else (None, [])
    framework = settings.run.backend if settings else None
    use_horovod = settings is not None and settings.reduce.use_horovod
    probes = packages.start_probes(framework)  # they take seconds, in which the other checks run
    libraries = mpi.versions()
    gpus, of_gpus = resources.check_gpus(environ, job.local_ranks)
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
        *resources.check_cores(environ, sorted(os.sched_getaffinity(0)), os.cpu_count() or 1, resources.container_quota()),
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
    """The disks for checkpoints and temporary files."""
    findings = []
    if settings is not None:
        findings.append(resources.check_disk(Path(settings.run.model).parent, "disk for checkpoints"))
    findings.append(resources.check_disk(temporary, "disk for temporary files", 100 * resources.MEGABYTE))
    return findings


def read_config(paths: list[Path], overrides: dict[str, str]) -> tuple[Settings | None, list[Finding]]:
    """The settings, or None; and the findings about the config."""
    try:
        return read_settings(paths, overrides), [ok("config", ", ".join(map(str, paths)))]
    except ConfigError as error:
        return None, [problem("config", each, "docs/keys.md describes every key") for each in error.problems]


MOST_FILES = 20
"""The number of HDF files whose contents are checked; all files are opened."""


def check_data(settings: Settings, ranks: int) -> list[Finding]:
    """Whether the datasets can be opened, their HDF files are sound and fast to read, and every rank gets batches."""
    findings = []
    files = hdf_files(settings)
    for path in files[:MOST_FILES]:
        report = check_file(path, seconds=0)
        findings += [problem("data", each, "python -m hvdtrain check tells more") for each in report.problems]
        cure = f"python -m hvdtrain check {path} --repack OUT, if the layout is the reason"
        findings += [warning("data", each if str(path) in each else f"{path}: {each}", cure) for each in report.warnings]
    if len(files) > MOST_FILES:
        findings.append(ok("data", f"{MOST_FILES} of {len(files)} HDF files were checked (python -m hvdtrain check: all)"))
    if any(finding.level == "problem" for finding in findings):
        return findings
    try:
        feeds = open_feeds(settings, SingleCommunicator())
        for feed in feeds:
            for level, line in feed_lines(feed):
                finding = (
                    ok("data", line) if level > 2 else warning("data", line, "look at batch_size, min_seq_length, max_seq_length")
                )
                findings.append(finding)
        batches = feeds[0].plan(1).num_batches
        if batches < ranks:
            text = f"an epoch has {batches} batches for {ranks} ranks: some ranks have nothing to do"
            findings.append(warning("data", text, "smaller max_seqs or batch_size, or fewer ranks"))
        for feed in feeds:
            feed.dataset.close()
    except HvdtrainError as error:
        findings.append(problem("data", str(error), "training would stop with the same error"))
    return findings


def hdf_files(settings: Settings) -> list[Path]:
    """The HDF files that the config's dataset dicts name, in their order, without repetitions."""
    values = [settings.data.train, settings.data.dev, settings.data.eval, *settings.data.eval_datasets.values()]
    return list(dict.fromkeys(Path(name) for value in values for name in _files(value)))


def _files(value: Any) -> Iterator[str]:
    """The files in a dataset dict, in dicts inside it, or in a list of names. Functions are not called."""
    if isinstance(value, str):
        yield from (name.strip() for name in value.split(",") if name.strip().endswith((".hdf", ".h5", ".hdf5")))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _files(each)
    elif isinstance(value, dict):
        if value.get("class", "HDFDataset") in ("HDFDataset", "FilesDataset"):
            files = value.get("files", [])
            yield from ([files] if isinstance(files, str) else files)
        for inside in ("dataset", "datasets"):
            inner = value.get(inside)
            yield from (_files(list(inner.values())) if inside == "datasets" and isinstance(inner, dict) else _files(inner))


PLACES, PIECE = 16, 4096
"""A fingerprint hashes this number of pieces, each of this number of bytes, spread over the file."""


def fingerprints(configs: list[Path], settings: Settings | None) -> dict[str, str]:
    """Fingerprints of the files that should be the same on all hosts, by name."""
    paths = [*configs, *(hdf_files(settings) if settings else [])]
    return {str(path): fingerprint(path) for path in paths}


def fingerprint(path: Path) -> str:
    """A file's size and a hash of pieces of it: quick, also for large files, and different for most other files."""
    try:
        size = path.stat().st_size
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for place in range(PLACES):
                file.seek(max(0, size - PIECE) * place // (PLACES - 1))
                digest.update(file.read(PIECE))
        return f"{size} bytes, {digest.hexdigest()[:8]}"
    except OSError as error:
        return f"not readable: {error.strerror}"
