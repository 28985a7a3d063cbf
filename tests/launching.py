"""Starting the program as a user does: alone, or on several ranks under mpirun."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOY = ROOT / "tests" / "toy" / "config.py"


@dataclass(frozen=True)
class Finished:
    """How a launch ended."""

    status: int
    out: str
    err: str
    seconds: float


def launch(arguments: Sequence[str], ranks: int | None = None, timeout: float = 120, folder: Path = ROOT) -> Finished:
    """Run `python ARGUMENTS`, under mpirun where a number of ranks is given."""
    command = [sys.executable, *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "HOROVOD_"))}
    if ranks is not None:
        command = ["mpirun", "-np", str(ranks), "--bind-to", "none", "--oversubscribe", *command]
        if os.geteuid() == 0:
            environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    started = time.monotonic()
    process = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )
    return Finished(process.returncode, process.stdout, process.stderr, time.monotonic() - started)


def hvdtrain(config: Path, overrides: dict[str, object], ranks: int | None = None, timeout: float = 120) -> Finished:
    """Run `python -m hvdtrain CONFIG ++KEY VALUE ...`."""
    arguments = ["-m", "hvdtrain", str(config)]
    for name, value in overrides.items():
        arguments += [f"++{name}", str(value)]
    return launch(arguments, ranks, timeout)
