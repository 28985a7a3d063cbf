"""Starting the runs: one rank alone, several under mpirun for Horovod, or by hvdtrain itself for torch.distributed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.comm import launch, local
from hvdtrain.comm.keys import LaunchKeys
from hvdtrain.comm.launch import Launch
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.settings import Settings

TRANSPORTS = {"horovod": "Horovod", "torch": "torch.distributed"}
"""Their names in the command and in the report."""

OF_OTHER_PROCESSES = ("init_method", "rank", "world_size")
"""Entries of torch_distributed that say how the processes of the training itself find each other."""


@dataclass(frozen=True)
class Run:
    """One training: over which transport (None: one rank, which needs none), and on how many ranks."""

    transport: str | None
    size: int

    @property
    def name(self) -> str:
        """For files."""
        return f"{self.transport or 'alone'}-{self.size}"

    def __str__(self) -> str:
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        return ranks if self.transport is None else f"{ranks} over {TRANSPORTS[self.transport]}"


def unavailable(transport: str, backend: str) -> str | None:
    """Why a transport cannot connect ranks of a framework on this host; None: it can. Nothing is imported."""
    if transport == "torch":
        return (
            None if "torch.distributed" in FRAMEWORKS[backend].features else f"backend = {backend!r}, which it does not connect"
        )
    found = find_spec("horovod")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    if not any(list(Path(folder, backend).glob("mpi_lib*.so")) for folder in folders):
        return f"no Horovod that was built for {backend} (python -m hvdtrain build-horovod)"
    return None if shutil.which("mpirun") else "no mpirun in PATH"


def keys_for(run: Run, settings: Settings) -> dict[str, str]:
    """The overrides with which a config trains in a run, whatever processes it asks for itself."""
    keys = {"use_horovod": str(run.transport == "horovod"), "torch_distributed": "None"}
    if run.transport == "torch":
        entries = {} if settings.torch_distributed is None else asdict(settings.torch_distributed)
        kept = {name: value for name, value in entries.items() if value is not None and name not in OF_OTHER_PROCESSES}
        keys["torch_distributed"] = repr(kept)
    for field in fields(LaunchKeys):
        if getattr(settings.launch, field.name) != field.default:
            keys[field.name] = str(field.default)
    if settings.launch.ngpu == 0:
        keys["device"] = "cpu"
    return keys


def start(run: Run, arguments: Sequence[str], keys: Mapping[str, str]) -> int:
    """Start the ranks and wait for them; return the exit status. What they print goes to the terminal.

    Args:
        arguments: of hvdtrain.
        keys: overrides that come after them.
    """
    program = [*arguments, *(word for name, value in keys.items() for word in (f"++{name}", value))]
    if run.transport != "horovod":
        wanted = [Launch("hvdtrain", rank, run.size, rank, run.size) for rank in range(run.size)]
        return local.run(wanted, program, launch.environment())
    command = ["mpirun", "-np", str(run.size), "--bind-to", "none", "--oversubscribe", sys.executable, "-m", "hvdtrain", *program]
    process = subprocess.Popen(command, env=dict(launch.environment()), stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except KeyboardInterrupt:  # mpirun has got it, too, and ends the ranks
        process.wait()
        raise
