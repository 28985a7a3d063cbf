"""A job: its resources, its time limit, and the command that starts its ranks, with its environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hvdtrain.comm.this_process import KEEPALIVE
from hvdtrain.errors import ConfigError, Problem
from hvdtrain.plugins.submit.sweep import case_lines

Launcher = Literal["python", "mpirun", "srun", "torchrun"]

STOPPED = 75
"""The exit status of a training that was stopped with a checkpoint and can be resumed."""

LAST_TASK_SECONDS = 60
"""How many seconds after the end of the first task srun kills the others."""

RENDEZVOUS_TIMEOUTS = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
"""With these, torchrun's agents consider one lost after 6 instead of 15 s, and wait for another one for 5 instead of 30 s."""

IF_SET = ("LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables that mpirun exports only if they are set, since -x with an unset variable is an error."""

DEFAULT_CORES = 2
"""Cores of a rank: one for computing, one for reading."""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """A scheduler: how scripts for it are written and submitted, and what it supports.

    Attributes:
        name: the value of --scheduler.
        write: returns a job's script or manifest.
        submit: the command that reads the script from its standard input.
        problems: returns the requests of a job that it cannot fulfil.
        array_index: the variable with the number of a job in its array, and the first number; None: it has no job arrays.
        unsupported: options of the command for which it has no counterpart.
        in_comments: options whose values it reads from a comment in the script.
        cores: the default number of cores of a rank; None: the cores of a host are divided among its ranks.
        slots_are_cores: whether its slots are cores rather than ranks.
        requeues: whether a stopped training can be put back into its queue.
        has_srun: whether srun starts processes on several hosts.
        in_container: whether the job runs in the container of --image, where an operator sets torchrun's variables.
    """

    name: str
    write: Callable[[Job], str]
    submit: tuple[str, ...]
    problems: Callable[[Job], list[Problem]] = lambda job: []
    array_index: tuple[str, int] | None = None
    unsupported: tuple[str, ...] = ()
    in_comments: tuple[str, ...] = ("--name", "--queue", "--account", "--output")
    cores: int | None = DEFAULT_CORES
    slots_are_cores: bool = False
    requeues: bool = True
    has_srun: bool = False
    in_container: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training on a cluster.

    Attributes:
        scheduler: for which the script is written.
        arguments: the trainer's arguments: configs, then `++key value`.
        written_by: the command that wrote the script, for a comment in it.
        folder: where the job runs, absolute.
        cpus_per_task: cores of a rank; None: the cores of a host are divided among its ranks.
        memory: of each host, in MB (1024 * 1024 bytes), independent of the scheduler's unit.
        seconds: the time limit; None: no limit.
        stop_before: how many seconds before the time limit the training gets the signal to stop with a checkpoint.
        requeue: whether a training that was stopped at the time limit goes back into the queue.
        max_restarts: how often torchrun restarts the ranks, if necessary without lost nodes.
        setup: lines of shell that make Python and MPI available.
        exports: names of variables that mpirun exports to all hosts, besides those that every job needs.
        options: options that are passed to the scheduler unchanged, such as '--mem-per-gpu=8G'.
        image: the container image, for Kubernetes.
        runs: for each job of an array, the arguments of its run; empty: a single job.
        volumes: claims of persistent volumes and where they are mounted, for Kubernetes.
    """

    name: str
    scheduler: Scheduler
    launcher: Launcher
    arguments: tuple[str, ...]
    python: str
    folder: str
    written_by: str
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    memory: int | None = None
    seconds: int | None = None
    stop_before: int = 300
    requeue: bool = True
    max_restarts: int = 0
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
    image: str | None = None
    volumes: tuple[tuple[str, str], ...] = ()
    runs: tuple[tuple[str, ...], ...] = ()

    @property
    def tasks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.tasks_per_node

    @property
    def cores(self) -> int:
        """The cores of all ranks of a host; 1 per rank if unknown."""
        return self.tasks_per_node * (self.cpus_per_task or 1)

    @property
    def slots(self) -> int:
        """The number of the scheduler's slots on a host."""
        return self.cores if self.scheduler.slots_are_cores else self.tasks_per_node

    @property
    def survives_nodes(self) -> bool:
        """Whether training continues without lost nodes."""
        return self.max_restarts > 0 and self.nodes > 1


def choose_launcher(wanted: Launcher | None, tasks: int, use_horovod: bool, torch_distributed: bool) -> Launcher:
    """The launcher that starts the ranks: the given one, or the one that the config's keys require.

    Raises:
        ConfigError: the config does not define how several ranks are connected, or the launcher contradicts its keys.

    >>> choose_launcher(None, 8, use_horovod=True, torch_distributed=False)
    'mpirun'
    >>> choose_launcher(None, 8, use_horovod=False, torch_distributed=True)
    'torchrun'
    """
    if tasks > 1 and not use_horovod and not torch_distributed:
        raise ConfigError.of(
            "conflict",
            f"use_horovod: expected use_horovod or torch_distributed for {tasks} ranks, got neither: each rank would train "
            "alone and overwrite the others' checkpoints (add ++use_horovod 1 to the command)",
        )
    if wanted == "python" and tasks > 1:
        raise ConfigError.of("conflict", f"--launcher: expected mpirun, srun or torchrun for {tasks} ranks, got python")
    if wanted == "torchrun" and use_horovod:
        raise ConfigError.of(
            "conflict", "--launcher: expected mpirun or srun for use_horovod, got torchrun (which is for torch_distributed)"
        )
    if wanted is not None:
        return wanted
    if tasks == 1:
        return "python"
    return "mpirun" if use_horovod else "torchrun"


def parse_seconds(text: str) -> int:
    """Parse a time as Slurm does: '24:00:00', '1-12:00:00', '90:00' (minutes and seconds), '30' (minutes).

    Raises:
        ValueError: it has another format, or is zero.

    >>> parse_seconds("24:00:00"), parse_seconds("1-12:00:00"), parse_seconds("90:00"), parse_seconds("30")
    (86400, 129600, 5400, 1800)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(text)
    days, *fields = match.groups()
    numbers = [int(field) for field in fields if field is not None]
    has_hours = days is not None or len(numbers) == 3
    hours, minutes, seconds = [*([] if has_hours else [0]), *numbers, 0, 0][:3]
    total = 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds
    if total == 0:
        raise ValueError(text)
    return total


def parse_megabytes(text: str) -> int:
    """Parse an amount of memory in MB (1024 * 1024 bytes): '64G', '64GB', '64GiB', '1.5T', '500M'; no unit means MB, as in Slurm.

    Raises:
        ValueError: it has another format, or is less than 1 MB.

    >>> parse_megabytes("64G"), parse_megabytes("64GiB"), parse_megabytes("1.5t"), parse_megabytes("500")
    (65536, 65536, 1572864, 500)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(text)
    megabytes = int(float(match[1]) * {"k": 1 / 1024, "m": 1, "": 1, "g": 1024, "t": 1024**2}[match[2]])
    if megabytes < 1:
        raise ValueError(text)
    return megabytes


def memory_text(megabytes: int, giga: str = "G", mega: str = "M") -> str:
    """An amount of memory in a scheduler's units of 1024**3 or 1024**2 bytes.

    >>> memory_text(65536), memory_text(5461), memory_text(65536, "Gi", "Mi")
    ('64G', '5461M', '64Gi')
    """
    return f"{megabytes // 1024}{giga}" if megabytes % 1024 == 0 else f"{megabytes}{mega}"


def clock(seconds: int) -> str:
    """Seconds as hh:mm:ss.

    >>> clock(129600)
    '36:00:00'
    """
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def fold_command(words: Sequence[str], indent: str = "    ", width: int = 110) -> str:
    """Break a command into lines, all but the last ending in a backslash.

    >>> fold_command(["mpirun", "-np 8", "-x PATH"], width=14).splitlines() == ["mpirun -np 8 " + chr(92), "    -x PATH"]
    True
    """
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def environment_lines(job: Job) -> list[str]:
    """Lines that set up the job's environment on the host where the script runs."""
    lines = [f"cd {shlex.join([job.folder])} || exit", *job.setup]
    if job.runs and job.scheduler.array_index is not None:
        lines += case_lines(*job.scheduler.array_index, job.runs)
    if job.cpus_per_task is not None:
        lines.append(f"export OMP_NUM_THREADS={job.cpus_per_task}  # per rank")
    if job.interface:
        lines.append(
            f"export NCCL_SOCKET_IFNAME={shlex.join([job.interface])}  # beginnings of names; =name is exact, ^name excludes"
        )
        if "," not in job.interface and not job.interface.startswith(("^", "=")):
            names = "HOROVOD_GLOO_IFACE" if job.launcher != "torchrun" else "GLOO_SOCKET_IFNAME"
            lines.append(f"export {names}={shlex.join([job.interface])}  # the whole name")
    if job.launcher == "torchrun":
        lines.append("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted ranks find the addresses of dead ones")
    return lines


def doctor_lines(job: Job, hosts: Sequence[str] = ()) -> list[str]:
    """Lines that run the doctor on the ranks' hosts if the job requests it, and end the job if it finds a problem."""
    return ["", f"{command(job, hosts, before=['doctor', '--no-measure'])} || exit"] if job.doctor else []


def command(job: Job, hosts: Sequence[str] = (), before: Sequence[str] = ()) -> str:
    """The command that starts hvdtrain on all ranks, folded into lines.

    Args:
        hosts: host:slots for mpirun, if no scheduler provides them.
        before: arguments before the config: another command of hvdtrain with its options.
    """
    python = shlex.join([job.python])
    program = shlex.join(["-m", "hvdtrain", *before, *job.arguments]) + (' "${sweep[@]}"' if job.runs else "")
    if job.launcher == "python":
        return f"{python} {program}"
    if job.launcher == "mpirun":
        return fold_command([*mpirun(job, hosts), f"{python} {program}"])
    if job.launcher == "srun":
        # Without --wait, the other tasks wait forever for one that was killed. --kill-on-bad-exit is faster, but it replaces the
        # exit status of the ranks, which decides whether the job is requeued.
        return fold_command([f"srun --mpi=pmix --cpu-bind=none --wait={LAST_TASK_SECONDS}", f"{python} {program}"])
    return fold_command([*torchrun(replace(job, max_restarts=0) if before else job), program])


def mpirun(job: Job, hosts: Sequence[str]) -> list[str]:
    """The mpirun command with its options."""
    words = [f"mpirun -np {job.tasks}"]
    if hosts:
        words.append(f"-H {','.join(hosts)}")
    # If slots are cores, mpirun would fill the first host with ranks.
    words += ["-bind-to none", "-map-by slot" if job.slots == job.tasks_per_node else f"-map-by ppr:{job.tasks_per_node}:node"]
    exported = ["PATH", *job.exports]
    if job.cpus_per_task is not None:
        exported.append("OMP_NUM_THREADS")
    if job.interface:
        exported.append("NCCL_SOCKET_IFNAME")
    words += [f"-x {shlex.join([name])}" for name in dict.fromkeys(exported)]
    words += [f"${{{name}:+-x {name}}}" for name in IF_SET if name not in exported]
    if job.nodes > 1:
        if job.interface and not job.interface.startswith(("^", "=")):
            interface = shlex.join([job.interface])
            words.append(f"--mca oob_tcp_if_include {interface} --mca btl_tcp_if_include {interface}")
        words.append(KEEPALIVE)
    if job.gpus_per_node:
        words.append("-mca pml ob1 -mca btl ^openib")  # NCCL moves the gradients
    return words


def torchrun(job: Job) -> list[str]:
    """The torchrun command with its options: one agent per node."""
    start = f"{shlex.join([job.python])} -m torch.distributed.run"
    if job.scheduler.in_container:
        return [start]  # the operator sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT
    words = [] if job.nodes == 1 or job.survives_nodes else [f"srun --ntasks={job.nodes} --ntasks-per-node=1"]
    nodes = f"1:{job.nodes}" if job.survives_nodes else str(job.nodes)
    words += [start, f"--nnodes={nodes} --nproc-per-node={job.tasks_per_node}"]
    words += [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    if job.nodes == 1:
        return [*words, "--standalone"]
    words.append('--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$master:$port"')
    return [*words, f"--rdzv-conf={RENDEZVOUS_TIMEOUTS}"] if job.survives_nodes else words


def background_lines(job: Job, run: str, before_limit: str, cancelled: str, timer: bool = False) -> list[str]:
    """Lines that start the command in the background, pass on signals, and wait for its end; then $status is its exit status.

    Args:
        run: the command.
        before_limit: signals that the scheduler sends shortly before the time limit.
        cancelled: signals with which a user cancels the job.
        timer: whether the script itself sends SIGUSR1 before the time limit, since the scheduler does not.
    """
    # On SIGTERM, mpirun kills the ranks within seconds, but it passes on SIGUSR1. torchrun passes on only SIGTERM.
    signal = "TERM" if job.launcher == "torchrun" else "USR1"
    occasion = f"On SIG{signal}" if job.launcher == "python" else f"{job.launcher} passes SIG{signal} on. On it"
    lines = [f"# {occasion} the trainer stops with a checkpoint, and ends with {STOPPED}.", f"{run} &", "pid=$!"]
    lines += ["cancelled=no"] if job.requeue and cancelled else []
    lines += ["stopped=no"] if job.launcher == "torchrun" else []
    stopped = "stopped=yes; " if job.launcher == "torchrun" else ""
    # srun does not pass on SIGTERM, but ends its tasks.
    through_srun = job.launcher == "torchrun" and job.scheduler.has_srun and job.nodes > 1
    pass_on = f'scancel --signal={signal} "$SLURM_JOB_ID"' if through_srun else f"kill -{signal} $pid"
    if before_limit:
        lines.append(f"trap '{stopped}{pass_on}' {before_limit}")
    if cancelled:
        noted = "cancelled=yes; " if job.requeue else ""
        lines.append(f"trap '{noted}{pass_on}' {cancelled}")
    if timer and job.seconds:
        seconds = max(60, job.seconds - job.stop_before)
        lines.append(
            f"(trap 'kill $!; exit' TERM; sleep {seconds} & wait; kill -USR1 $$) &  # {job.stop_before} s before the limit"
        )
        lines.append("timer=$!")
    lines.append("while kill -0 $pid 2>/dev/null; do wait $pid; done  # a signal ends a wait, not the training")
    lines.append("wait $pid; status=$?")
    if job.launcher == "torchrun":
        lines.append(f"if [ $stopped = yes ] && [ $status != 0 ]; then status={STOPPED}; fi  # torchrun itself ends with 1")
    if timer and job.seconds:
        lines.append("kill $timer 2>/dev/null")
    return lines
