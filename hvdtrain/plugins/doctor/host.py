"""All checks of one host, in the order of the report, with the config, its data, and the variables that launchers set."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.comm import this_process
from hvdtrain.comm.launchers import launchers
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.comm.this_process import KEEPALIVE
from hvdtrain.data.describe import feed_lines
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.learner.frameworks import FRAMEWORKS, library_of
from hvdtrain.plugins.doctor import network, packages, resources
from hvdtrain.plugins.doctor.findings import Finding, HostReport, libraries, of_environment, ok, problem, warning
from hvdtrain.plugins.doctor.network import read_interfaces
from hvdtrain.plugins.hdf_tools.check import check as check_file
from hvdtrain.settings import Settings, read_settings, with_datasets
from hvdtrain.start_up.data import open_feeds


def examine(configs: list[Path], overrides: dict[str, str], other_hosts: int) -> tuple[HostReport, Settings | None]:
    """Run all checks on this host; return the report, and the config's settings if there are any.

    Args:
        configs: of the planned training; empty: check only the host.
        other_hosts: the number of hosts besides this one and those that the launcher knows.
    """
    place = this_process.place()
    environ = this_process.environment()
    several_hosts = other_hosts > 0 or place.size > place.local_size
    settings, of_config = read_config(configs, overrides) if configs else (None, [])
    framework = library_of(settings.run.backend) if settings else None
    use_horovod = settings is not None and settings.reduce.use_horovod
    name = socket.gethostname()
    with ThreadPoolExecutor() as pool:  # other programs and the name service may be slow: ask all at once
        probes = packages.start_probes(framework, pool)
        asked_mpi = pool.submit(packages.versions)
        asked_slurm = pool.submit(packages.check_srun)
        asked_gpus = pool.submit(resources.check_gpus, environ, place.local_size)
        asked_name = pool.submit(network.check_name, name, several_hosts)
        files = hdf_files(settings) if settings else []
        of_data = check_data(settings, place.size) if settings else []
        if place.size > 1:  # this process needs the framework, too: import it while the probes do so
            with suppress(Exception):  # the probe reports why
                _ = FRAMEWORKS[framework_of(settings)].tensors
    libraries = asked_mpi.result()
    gpus, of_gpus = asked_gpus.result()
    interfaces = read_interfaces()
    findings = packages.check_packages(framework, use_horovod)
    before = [
        *packages.check_mpi(libraries, place.launcher),
        *asked_slurm.result(),
        *of_gpus,
        *check_environment(environ),
        *network.check_interfaces(environ, interfaces, several_hosts),
        asked_name.result(),
        *network.check_master(environ, is_master=place.launcher is None),
        *network.check_ports(),
        *resources.check_cores(environ, sorted(os.sched_getaffinity(0)), os.cpu_count() or 1, resources.container_quota()),
        resources.check_shared_memory(place.local_size, len(gpus)),
        *resources.check_memory(),
        *resources.check_limits(len(files), len(gpus), infiniband=any(Path("/sys/class/infiniband").glob("*"))),
        *check_disks(settings, Path(environ.get("TMPDIR") or tempfile.gettempdir())),
        *of_config,
        *of_data,
    ]
    for package, probe in probes.items():
        findings += packages.check_horovod(package, probe, use_horovod, len(gpus))
    facts = packages.facts()
    facts |= {f"MPI of {package}": library for package, library in libraries.items()}
    facts |= {"cores": str(os.cpu_count()), "GPUs": ", ".join(gpu.name for gpu in gpus) or "none"}
    facts |= {"driver": gpus[0].driver} if gpus else {}
    facts |= of_environment(environ) | {str(path): fingerprint(path) for path in [*configs, *files]}
    return HostReport(name, [*findings, *before], facts, network.nccl_address(environ, interfaces)), settings


def framework_of(settings: Settings | None) -> str:
    """The config's framework; without one, one that is installed."""
    if settings is not None:
        return settings.run.backend
    return next((name for name in libraries() if packages.installed_version(name)), libraries()[-1])


def check_disks(settings: Settings | None, temporary: Path) -> list[Finding]:
    """The disks for checkpoints and temporary files."""
    finding = resources.check_disk(temporary, "disk for temporary files", 100 * resources.MEGABYTE)
    if settings is None:
        return [finding]
    return [resources.check_disk(Path(settings.run.model).parent, "disk for checkpoints"), finding]


def read_config(paths: list[Path], overrides: dict[str, str]) -> tuple[Settings | None, list[Finding]]:
    """The settings, or None; and the findings about the config."""
    try:
        return with_datasets(read_settings(paths, overrides)), [ok("config", ", ".join(map(str, paths)))]
    except ConfigError as error:
        return None, [problem("config", str(each), "docs/keys.md describes every key") for each in error.problems]


MOST_FILES = 20
"""The number of HDF files whose contents are checked; all files are opened."""


def check_data(settings: Settings, ranks: int) -> list[Finding]:
    """Whether the datasets can be opened, their HDF files are sound and fast to read, and every rank gets batches."""
    findings = []
    files = hdf_files(settings)
    for path in files[:MOST_FILES]:
        report = check_file(path, seconds=0)
        findings += [problem("data", text, "python -m hvdtrain check shows more") for text in report.problems]
        fix = f"python -m hvdtrain check {path} --repack OUT, if the layout is the reason"
        findings += [warning("data", text if str(path) in text else f"{path}: {text}", fix) for text in report.warnings]
    if len(files) > MOST_FILES:
        findings.append(ok("data", f"{MOST_FILES} of {len(files)} HDF files were checked (python -m hvdtrain check: all)"))
    if any(finding.level == "problem" for finding in findings):
        return findings
    try:
        feeds = open_feeds(settings, SingleCommunicator())
        for feed in feeds:
            fix = "look at batch_size, min_seq_length, max_seq_length"
            findings += [ok("data", line) if level > 2 else warning("data", line, fix) for level, line in feed_lines(feed)]
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
        for item in value:
            yield from _files(item)
    elif isinstance(value, dict):
        if value.get("class", "HDFDataset") in ("HDFDataset", "FilesDataset"):
            files = value.get("files", [])
            yield from ([files] if isinstance(files, str) else files)
        for inside in ("dataset", "datasets"):
            inner = value.get(inside)
            yield from (_files(list(inner.values())) if inside == "datasets" and isinstance(inner, dict) else _files(inner))


PLACES = 16
"""The number of pieces of a file, spread over it, that a fingerprint hashes."""

PIECE = 4096
"""The bytes of each."""


def fingerprint(path: Path) -> str:
    """A file's size and a hash of pieces of it: fast even for large files, and most likely different for different files."""
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


def check_environment(environ: Mapping[str, str]) -> list[Finding]:
    """All checks of the variables that launchers set. One of them also looks for the file of a file:// rendezvous."""
    checks = (check_ranks, check_sizes, check_torchrun, check_mpirun, check_init_file)
    return [finding for check in checks for finding in check(environ)]


VARIABLES = list(dict.fromkeys((launcher.name, names) for launcher in launchers().values() for names in launcher.variables))
"""Every launcher with its variables for rank, size, local rank and local size."""


def check_ranks(environ: Mapping[str, str]) -> list[Finding]:
    """Whether the variables of each launcher are consistent.

    A stale MASTER_ADDR or a WORLD_SIZE without RANK, left over from another job, makes a script that reads one of them
    assume a launcher that did not start it.

    >>> [finding.text for finding in check_ranks({"RANK": "4", "WORLD_SIZE": "4"})]
    ['expected RANK below WORLD_SIZE = 4, got 4']
    >>> [finding.level for finding in check_ranks({"WORLD_SIZE": "4"})], check_ranks({"RANK": "0", "WORLD_SIZE": "1"})
    (['warning'], [])
    """
    findings = []
    for launcher, (rank, size, local_rank, _) in VARIABLES:
        values = {name: environ[name] for name in (rank, size, local_rank) if name in environ}
        wrong = [name for name, value in values.items() if not value.isdigit()]
        for name in wrong:
            findings.append(problem(name, f"expected a number, got {values[name]!r}", f"unset {name}; {launcher} sets it"))
        if wrong or launcher == "srun":
            continue
        if (rank in values) != (size in values):
            alone = rank if rank in values else size
            text = f"{alone} = {values[alone]} is set, but not {size if alone == rank else rank}: left over from another job?"
            findings.append(warning(alone, text, f"unset {alone}, or start with {launcher}"))
        elif rank in values and int(values[rank]) >= int(values[size]):
            text = f"expected {rank} below {size} = {values[size]}, got {values[rank]}"
            findings.append(problem(rank, text, f"unset {rank} {size}, or start with {launcher}; it is not the number of a node"))
    for name in ("local_rank", "rank", "world_size"):
        if name in environ:
            fix = f"export {name.upper()}={environ[name]}"
            findings.append(warning(name, f"{name} is set; programs read {name.upper()}", fix))
    if "MASTER_ADDR" in environ and "RANK" not in environ and "SLURM_PROCID" not in environ:
        text = f"MASTER_ADDR = {environ['MASTER_ADDR']} is set, but not RANK: left over from another job?"
        findings.append(warning("MASTER_ADDR", text, "unset MASTER_ADDR, or start with torchrun"))
    return findings


def check_sizes(environ: Mapping[str, str]) -> list[Finding]:
    """Whether all launchers whose variables are set agree on the number of ranks.

    >>> [finding.text for finding in check_sizes({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
    ...                                           "RANK": "0", "WORLD_SIZE": "1"})]
    ['expected one number of ranks, got WORLD_SIZE = 1 and OMPI_COMM_WORLD_SIZE = 4']
    """
    sizes = {size: environ[size] for _, (rank, size, _, _) in VARIABLES if environ.get(rank, "").isdigit() and size in environ}
    sizes.pop("SLURM_STEP_NUM_TASKS", None)  # of the step that started mpirun's daemons or torchrun: theirs
    if len(set(sizes.values())) > 1:
        text = f"expected one number of ranks, got {' and '.join(f'{name} = {value}' for name, value in sizes.items())}"
        return [problem("launchers", text, "use one launcher only, and unset the variables of the other")]
    return [ok("ranks", ", ".join(f"{name} = {value}" for name, value in sizes.items()))] if sizes else []


def check_torchrun(environ: Mapping[str, str]) -> list[Finding]:
    """Restarts of torchrun fail with gloo if the agents share their store with the ranks.

    >>> check_torchrun({"TORCHELASTIC_MAX_RESTARTS": "2"})[0].level, check_torchrun({"TORCHELASTIC_MAX_RESTARTS": "0"})
    ('warning', [])
    """
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts.isdigit() and int(restarts) > 0 and environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        text = f"torchrun may restart {restarts} times, but restarted ranks find the addresses of dead ranks in its store"
        return [warning("torchrun", text, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun")]
    return []


def check_mpirun(environ: Mapping[str, str]) -> list[Finding]:
    """Whether mpirun would notice the loss of a host.

    >>> check_mpirun({"OMPI_MCA_orte_num_nodes": "2"})[0].level, check_mpirun({"OMPI_MCA_orte_num_nodes": "1"})
    ('warning', [])
    """
    nodes = environ.get("OMPI_MCA_orte_num_nodes", "1")
    if nodes.isdigit() and int(nodes) > 1 and "OMPI_MCA_oob_tcp_keepalive_time" not in environ:
        text = f"on {nodes} hosts, without keepalive: if a host is lost, the job hangs forever"
        return [warning("mpirun", text, f"add {KEEPALIVE}")]
    return []


def check_init_file(environ: Mapping[str, str]) -> list[Finding]:
    """Whether a file:// rendezvous has been used before: torch.distributed fails on the second use, unless it is removed."""
    method = environ.get("DIST_INIT_METHOD", "")
    path = Path(method.removeprefix("file://"))
    if not method.startswith("file://") or not path.exists():
        return []
    text = f"{path} is left over from an earlier run"
    return [warning("DIST_INIT_METHOD", text, f"rm {path}, or a new name for every run")]
