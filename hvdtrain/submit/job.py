"""A job's resources, its time limit, and how its ranks are started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import ConfigError

Launcher = Literal["python", "mpirun", "srun", "torchrun"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training on a cluster.

    Attributes:
        arguments: of the trainer: configs, then `++key value`.
        written_by: the command that wrote the script, for a comment in it.
        folder: where the job runs, absolute.
        seconds: the time limit; None: no limit.
        stop_before: seconds before the time limit at which the training is told to stop with a checkpoint.
        requeue: whether a training that was stopped at the time limit goes back into the queue.
        setup: lines of shell that make Python and MPI available.
        exports: names of variables that mpirun exports to all hosts, besides those that every job needs.
        options: options that are passed to the scheduler as they are, such as '--mem-per-gpu=8G'.
    """

    name: str
    launcher: Launcher
    arguments: tuple[str, ...]
    python: str
    folder: str
    written_by: str
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    memory: str | None = None
    seconds: int | None = None
    stop_before: int = 300
    requeue: bool = True
    queue: str | None = None
    account: str | None = None
    parallel_environment: str = "mpi"
    hosts: tuple[str, ...] = ()
    interface: str | None = None
    output: str = "."
    setup: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    doctor: bool = False

    @property
    def tasks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.tasks_per_node

    @property
    def threads(self) -> int | None:
        """OMP_NUM_THREADS; None: hvdtrain divides a host's cores among its ranks by itself."""
        return self.cpus_per_task


def choose_launcher(wanted: Launcher | None, tasks: int, use_horovod: bool, torch_distributed: bool) -> Launcher:
    """How the ranks are started: as asked, or as the config's keys require.

    Raises:
        ConfigError: the config does not say how several ranks are connected, or the launcher does not go with its keys.

    >>> choose_launcher(None, 8, use_horovod=True, torch_distributed=False)
    'mpirun'
    >>> choose_launcher(None, 8, use_horovod=False, torch_distributed=True)
    'torchrun'
    """
    if tasks > 1 and not use_horovod and not torch_distributed:
        raise ConfigError(
            [
                f"use_horovod: expected use_horovod or torch_distributed for {tasks} ranks, got neither: each rank would train "
                "alone and overwrite the others' checkpoints (add ++use_horovod 1 to the command)"
            ]
        )
    if wanted == "python" and tasks > 1:
        raise ConfigError([f"--launcher: expected mpirun, srun or torchrun for {tasks} ranks, got python"])
    if wanted == "torchrun" and use_horovod:
        raise ConfigError(["--launcher: expected mpirun or srun for use_horovod, got torchrun (which is for torch_distributed)"])
    if wanted is not None:
        return wanted
    if tasks == 1:
        return "python"
    return "mpirun" if use_horovod else "torchrun"


def seconds_of(text: str) -> int:
    """A time in seconds: '24:00:00', '1-12:00:00', '90:00' (minutes and seconds), '30' (minutes), as Slurm reads them.

    Raises:
        ValueError: it is none of these, or zero.

    >>> seconds_of("24:00:00"), seconds_of("1-12:00:00"), seconds_of("90:00"), seconds_of("30")
    (86400, 129600, 5400, 1800)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(text)
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) == 2 else 0
    total = 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds
    if total == 0:
        raise ValueError(text)
    return total


def clock(seconds: int) -> str:
    """Seconds as hh:mm:ss.

    >>> clock(129600)
    '36:00:00'
    """
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def folded(words: Sequence[str], indent: str = "    ", width: int = 110) -> str:
    """A command in lines that end in a backslash where another follows.

    >>> folded(["mpirun", "-np 8", "-x PATH"], width=14).splitlines() == ["mpirun -np 8 " + chr(92), "    -x PATH"]
    True
    """
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def quoted(words: Sequence[str]) -> str:
    """Words for the shell."""
    return shlex.join(words)
