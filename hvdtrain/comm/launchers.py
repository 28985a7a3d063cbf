"""The ways to start a process, and for each of them the actions when a rank fails or stops.

A new launcher is a class, and a line in `launchers` or in the table of a plug-in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from hvdtrain.comm.child import GONE
from hvdtrain.comm.slurm import tasks_per_node
from hvdtrain.errors import LaunchError, Outcome

SECONDS_FOR_THE_CAUSE = 1.0
"""How long a rank waits before it reports that another one failed, so that the cause, from that rank or the launcher, is printed
first. Most launchers end this rank meanwhile."""

INIT = 1
"""The process that adopts those whose parent has ended; in a container, it may be the launcher itself."""


def _is_of_torch(process: int) -> bool:
    try:
        return b"torch" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


@dataclass(frozen=True)
class Place:
    """A process's place in its job, from the launcher. Without a launcher: rank 0 of 1."""

    launcher: str | None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


class Check(Protocol):
    """A picklable object that finds out what may have ended a process."""

    def check(self) -> None:
        """Raises: HvdtrainError, with the cause."""
        ...


class Launcher:
    """What started this process. By default, it restarts nothing, and ends all ranks when one has failed.

    Args:
        environ: the environment of this process.
        place: the process's place in its job.

    Attributes:
        name: its name in messages.
        variables: the environment variables with rank, size, local rank and local size; several: one of them.
        proof: a variable that only the launcher itself sets, where people set `variables` as well; None: they do not.
        excludes: a variable of a launcher that never starts this one: what has both has left-over variables.
        depth: launchers may run one another: the one with the highest depth that detects itself has started the process.
        max_restarts_hint: what to use instead of the key max_restarts.
        peer_status: the exit status of a rank that ends because of another one.
        hung_status: that of a rank that hangs.
        outlives: seconds for which the other ranks outlive one that hangs, so that the launcher reports that one.
    """

    name: ClassVar[str | None] = None
    variables: ClassVar[Sequence[tuple[str, str, str, str]]] = ()
    proof: ClassVar[str | None] = None
    excludes: ClassVar[str] = ""
    depth: ClassVar[int] = 40
    max_restarts_hint: ClassVar[str] = (
        "the same command continues from the newest checkpoint; torchrun --max-restarts N restarts ranks"
    )
    peer_status: ClassVar[int] = 1
    hung_status: ClassVar[int] = 1
    outlives: ClassVar[float] = 1.0

    def __init__(self, environ: Mapping[str, str], place: Place) -> None:
        self._environ = environ
        self.place = place

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Launcher | None:
        """The launcher, if it has started the process with this environment."""
        for rank, size, local_rank, local_size in cls.variables:
            if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
                local = (number_in(environ, local_rank, 0), cls._local_size(environ, local_size))
                return cls(environ, Place(cls.name, int(environ[rank]), int(environ[size]), *local))
        return None

    @classmethod
    def _local_size(cls, environ: Mapping[str, str], variable: str) -> int:
        return number_in(environ, variable, 1)

    @classmethod
    def start(cls, settings: Any, arguments: Sequence[str], folder: str) -> int | None:
        """Start the processes for which the keys ask this launcher, and wait for them.

        Args:
            settings: `hvdtrain.settings.Settings`.
            arguments: the arguments of the command line.
            folder: the one in which the command was given; the config may have changed to another one.

        Returns:
            The exit status; None: the keys do not ask for it, and this process is a rank itself.

        Raises:
            LaunchError: the keys contradict the launcher of this process.
        """
        return None

    @property
    def evidence(self) -> str:
        """The variables that say which rank this is, with their values."""
        names = next((names[:2] for names in self.variables if names[0] in self._environ), ())
        return " and ".join(f"{name}={self._environ.get(name)}" for name in names)

    @property
    def restarts(self) -> Literal["never", "all ranks", "lost ranks"]:
        """Which ranks it may restart. With "lost ranks", the others keep running."""
        return "never"

    @property
    def is_restart(self) -> bool:
        """Whether this is a restart of the ranks."""
        return False

    @property
    def began(self) -> float | None:
        """The time at which it began; None: unknown."""
        return None

    @property
    def grace(self) -> float | None:
        """The seconds for which it lets ranks live after SIGTERM; None: as long as they need."""
        return None

    @property
    def failures(self) -> Sequence[float]:
        """The times at which it lost ranks and restarted them, as far as known."""
        return ()

    @property
    def parent(self) -> int | None:
        """The process id of the launcher, if its ranks have to end by themselves when it is gone; None: they are ended for it."""
        return None

    def on_start(self) -> int | None:
        """Called when the program begins. Returns an exit status if the process must not train, after printing why."""
        return None

    def refuse_to_repeat(self) -> None:
        """Raises: TrainingError, if an earlier attempt on this host ended with an error that would only repeat."""

    def leave_checks(self, checks: Sequence[Check]) -> None:
        """Called when the data is open, with the checks to run if a signal ends this process."""

    def on_training(self) -> None:
        """Called on rank 0 when a training begins, which signals can stop from now on."""

    def on_success(self) -> None:
        """Called when the work is done."""

    def on_failure(self, outcome: Outcome, message: str) -> str:
        """Called before a failure is printed. Returns text to add to the message, or continues as a new program instead."""
        if outcome.scope == "a peer":
            time.sleep(SECONDS_FOR_THE_CAUSE)
        return ""

    def on_stop(self, outcome: Outcome, message: str) -> None:
        """Called before the message that a training was stopped with a checkpoint. May continue as a new program instead."""
        self.on_failure(outcome, message)


class SingleProcess(Launcher):
    """No launcher."""

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Launcher:
        """This one, for any environment."""
        return cls(environ, Place(cls.name))


class Mpirun(Launcher):
    """That of Open MPI or MPICH."""

    name = "mpirun"
    depth = 10
    variables = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    )

    @property
    def grace(self) -> float | None:
        return float(number_in(self._environ, "OMPI_MCA_odls_base_sigkill_timeout", 1))


class Srun(Launcher):
    """A job step of Slurm. A plain `python` in an sbatch script has SLURM_NTASKS as well, but is a single process."""

    name = "srun"
    depth = 0
    variables = (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),)
    max_restarts_hint = "sbatch --requeue starts the job again"

    @classmethod
    def _local_size(cls, environ: Mapping[str, str], variable: str) -> int:
        """The number of tasks of the step on this node; nodes may have different numbers."""
        tasks = tasks_per_node(environ.get(variable, ""))
        node = number_in(environ, "SLURM_NODEID", 0)
        return tasks[node] if node < len(tasks) else 1


class Torchrun(Launcher):
    """That of torch.distributed. Where it may restart ranks, plugins/torchrun sees to it that no error is repeated."""

    name = "torchrun"
    variables = (("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),)
    proof = "TORCHELASTIC_RUN_ID"
    depth = 20
    max_restarts_hint = "torchrun --max-restarts N restarts them"

    @property
    def parent(self) -> int | None:
        if "TORCHELASTIC_RUN_ID" not in self._environ:
            return None
        parent = os.getppid()
        return parent if parent != INIT or _is_of_torch(parent) else GONE  # it ended before this process came here


class Horovodrun(Launcher):
    """That of Horovod, without its elastic driver."""

    name = "horovodrun"
    depth = 30
    variables = (("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),)
    proof = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
    excludes = "OMPI_COMM_WORLD_RANK"  # in a shell that srun has started, there may be horovodrun
    max_restarts_hint = "horovodrun --min-np N --host-discovery-script SCRIPT restarts them"


@cache
def launchers() -> Mapping[str, type[Launcher]]:
    """The launchers by any name, those of plug-ins, too; `SingleProcess` is none."""
    from hvdtrain.config.plugins import Registry  # here, as every config imports this file

    # A dict: a config may ask for the rank in every step.
    return dict(Registry("launchers", {"horovodrun": Horovodrun, "torchrun": Torchrun, "mpirun": Mpirun, "srun": Srun}))


def launcher_of(environ: Mapping[str, str]) -> Launcher:
    """The launcher that has started a process with this environment."""
    return _detected(environ)[0]


def _detected(environ: Mapping[str, str]) -> list[Launcher]:
    """All whose variables are there, the innermost first, then `SingleProcess`."""
    kinds = sorted(launchers().values(), key=attrgetter("depth"), reverse=True)
    detected = [launcher for kind in kinds if (launcher := kind.detect(environ)) is not None]
    return [*detected, SingleProcess.detect(environ)]


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises: LaunchError, if left-over variables contradict those of the launcher: the ranks would train each by itself."""
    innermost, *outer_launchers = _detected(environ)
    if innermost.proof is None or (innermost.proof in environ and innermost.excludes not in environ):
        return
    for launcher in outer_launchers:
        if launcher.place.size > 1 and (launcher.place.rank, launcher.place.size) != (innermost.place.rank, innermost.place.size):
            raise LaunchError(
                f"the environment: expected the variables of one launcher, got {innermost.evidence}, and "
                f"{launcher.evidence} of {launcher.name} (unset {innermost.evidence.partition('=')[0]}, if it is left over)"
            )


def detect(environ: Mapping[str, str]) -> Place:
    """A process's place in its job, from the launcher's variables.

    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    Place(launcher='mpirun', rank=1, size=2, local_rank=1, local_size=1)
    >>> detect({})
    Place(launcher=None, rank=0, size=1, local_rank=0, local_size=1)
    """
    return launcher_of(environ).place


def number_in(environ: Mapping[str, str], name: str, default: int) -> int:
    """The number in a variable; the default if the variable is not set or not a number."""
    text = environ.get(name, "")
    return int(text) if text.isdigit() else default
