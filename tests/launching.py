"""Starting the program as a user does: alone, or on several ranks under mpirun."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from hvdtrain.errors import ConfigError, Problem

ROOT = Path(__file__).resolve().parent.parent
EMPTY: Mapping[str, str] = {}
TOY = ROOT / "tests" / "toy" / "config.py"


@dataclass(frozen=True)
class Finished:
    """How a launch ended."""

    status: int
    out: str
    err: str
    seconds: float
    problems: tuple[str, ...] = ()
    """Those of the config, each as of `faults`, of a run in the tests' own process."""

    def names(self, key: str, got: object = "") -> bool:
        """Whether the errors have a line about a key, or a file, that names what came."""
        return any(line.strip().startswith(f"{key}: ") and str(got) in line for line in self.err.splitlines())


def launch(
    arguments: Sequence[str], ranks: int | None = None, timeout: float = 120, environment: Mapping[str, str] = EMPTY
) -> Finished:
    """Run `python ARGUMENTS`, under mpirun where a number of ranks is given, with more in the environment."""
    command = [sys.executable, *map(str, arguments)]
    environment = clean_environment() | dict(environment)
    if ranks is not None:
        command = ["mpirun", "-np", str(ranks), "--bind-to", "none", "--oversubscribe", *command]
        if os.geteuid() == 0:
            environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return finish(command, timeout, environment)


def torchrun(
    arguments: Sequence[str], ranks: int, timeout: float = 120, environment: Mapping[str, str] = EMPTY, *options: str
) -> Finished:
    """Run `torchrun python ARGUMENTS` on this host, with more in the environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *options]
    return finish([*command, *map(str, arguments)], timeout, clean_environment() | dict(environment))


@cache
def mpi_version() -> str:
    """That of mpirun, such as '4.1.4'."""
    from hvdtrain.plugins.doctor.packages import implementation  # here, as the package may have no plug-ins

    found = implementation(subprocess.run(["mpirun", "--version"], capture_output=True, check=True, encoding="utf-8").stdout)
    assert found is not None
    return found[1]


def clean_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment without what a launcher set: the tests may run under one themselves."""
    started_by = ("OMPI_", "PMI_", "PMIX_", "HOROVOD_", "SLURM_", "TORCHELASTIC_", "HVDTRAIN_", "MASTER_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in environment.items() if not name.startswith(started_by) and name not in names}


def finish(command: Sequence[str], timeout: float, environment: Mapping[str, str]) -> Finished:
    """Run a command to its end."""
    started = time.monotonic()
    process = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )
    return Finished(process.returncode, process.stdout, process.stderr, time.monotonic() - started)


@contextmanager
def in_turn(folder: Path, alone: bool) -> Iterator[None]:
    """Around every test: one that measures time runs alone, while the other workers wait. The locks are in a folder."""
    with ExitStack() as inside:
        with locked(folder / "turn.lock", fcntl.LOCK_EX):  # who wants to be alone is not overtaken for ever
            inside.enter_context(locked(folder / "quiet.lock", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


@contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """Hold the lock of a file, as `fcntl.flock` takes it."""
    with path.open("w") as lock:
        fcntl.flock(lock, how)
        try:
            yield
        finally:  # closing it is not enough: a process that was forked meanwhile, and lives on, has a copy
            fcntl.flock(lock, fcntl.LOCK_UN)


def hvdtrain(
    config: Path,
    overrides: Mapping[str, object],
    ranks: int | None = None,
    timeout: float = 120,
    environment: Mapping[str, str] = EMPTY,
    options: Sequence[str] = (),
) -> Finished:
    """Run `python -m hvdtrain CONFIG OPTIONS ++KEY VALUE ...`.

    One rank runs in this process (inside.py), unless it is given an environment, or keys of which the process is a part.
    """
    arguments = [str(config), *options]
    for name, value in overrides.items():
        arguments += [f"++{name}", str(value)]
    if ranks is None and not environment and not takes_a_process(config, overrides):
        from inside import run_inside  # here, as it imports PyTorch

        return run_inside(arguments)
    return launch(["-m", "hvdtrain", *arguments], ranks, timeout, environment)


def takes_a_process(config: Path, overrides: Mapping[str, object]) -> bool:
    """Whether a training kills its process, sends it signals, connects it with others, or changes it for good."""
    keys = {key for key, value in overrides.items() if value not in (None, False)}
    if keys & {"fault", "use_horovod", "torch_distributed", "ngpu", "torch_compile"}:
        return True
    return config.exists() and 'backend = "tensorflow"' in config.read_text()


def trainings(folder: Path) -> list[str]:
    """The processes whose command line speaks of a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has just ended
        found += [text] if str(folder) in text else []
    return found


def faults(problems: Iterable[Problem]) -> list[str]:
    """Of each config problem key and rule, such as 'max_seqs: out-of-range'; tests/config/messages.txt has the sentences."""
    return [f"{problem.key}: {problem.rule}" for problem in problems]


@contextmanager
def refused(*expected: str) -> Iterator[None]:
    """A ConfigError with these problems is raised inside, each as of `faults`."""
    with pytest.raises(ConfigError) as caught:
        yield
    assert faults(caught.value.problems) == list(expected), caught.value
