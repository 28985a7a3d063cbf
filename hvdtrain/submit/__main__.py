"""The command `hvdtrain submit CONFIG --scheduler slurm --nodes 2 ...`; also `python -m hvdtrain.submit`."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hvdtrain.config.source import command_parser, parse_command_line, split_overrides
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.settings import Settings, read_settings
from hvdtrain.submit.job import Job, choose_launcher, seconds_of
from hvdtrain.submit.schedulers import plain_script, sge_script, slurm_script

USAGE = "python -m hvdtrain submit CONFIG [CONFIG ...] --scheduler slurm|sge|mpi [options] [++KEY VALUE ...]"

DESCRIPTION = """\
Write the job script for a training and print it, or submit it with --submit. The config is checked first, so its problems
are reported before anything waits in a queue. Shortly before the time limit the training stops with a checkpoint, and the
job goes back into the queue."""

EPILOG = """\
exit status
  0  printed or submitted
  1  the scheduler refused the script
  2  a problem in the config or the options; nothing was submitted

The script runs in the current folder, with this Python. --setup adds a line of shell that your cluster needs, such as
'module load openmpi'; --option adds a line for the scheduler, such as '--constraint=h100'. Both may be repeated.
"""

START = 180
"""Seconds that a training has at least: a signal during start-up kills it, and Slurm may send the signal a minute early."""

WRITERS: dict[str, Callable[[Job], str]] = {"slurm": slurm_script, "sge": sge_script, "mpi": plain_script}
SUBMITTERS = {"slurm": ["sbatch"], "sge": ["qsub"], "mpi": ["bash"]}


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    given, overrides_given = split_overrides(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    try:
        configs, overrides = parse_command_line([*options.configs, *overrides_given])
        job = job_of(options, read_settings(configs, overrides), overrides_given, [*given, *overrides_given])
    except HvdtrainError as error:
        print(error, file=sys.stderr)
        return 2
    script = WRITERS[options.scheduler](job)
    if options.out is not None:
        options.out.write_text(script)
    if not options.submit:
        print(script, end="") if options.out is None else print(f"wrote {options.out}")
        return 0
    Path(job.output).mkdir(parents=True, exist_ok=True)
    return submit(script, SUBMITTERS[options.scheduler])


def job_of(options: argparse.Namespace, settings: Settings, overrides: list[str], given: list[str]) -> Job:
    """The job that the options and the config describe. Raises: ConfigError, with all problems."""
    problems = []
    for name in ("nodes", "tasks_per_node", "cpus_per_task", "stop_before"):
        value = getattr(options, name)
        if value is not None and value < 1:
            problems.append(f"--{name.replace('_', '-')}: expected a positive number, got {value}")
    if options.gpus_per_node < 0:
        problems.append(f"--gpus-per-node: expected zero or a positive number, got {options.gpus_per_node}")
    elif 0 < options.gpus_per_node < options.tasks_per_node:
        problems.append(
            f"--gpus-per-node: expected one for each of {options.tasks_per_node} ranks of a node, got {options.gpus_per_node}"
        )
    seconds = None
    if options.time is not None:
        try:
            seconds = seconds_of(options.time)
        except ValueError:
            problems.append(f"--time: expected hh:mm:ss, d-hh:mm:ss or minutes, got {options.time!r}")
        if seconds is not None and seconds < options.stop_before + START:
            problems.append(
                f"--stop-before: expected at least {START} s less than --time ({seconds} s), which starting may take, got "
                f"{options.stop_before}"
            )
    hosts = tuple(filter(None, options.hosts.split(",")))
    if options.scheduler == "mpi" and options.nodes > 1 and len(hosts) != options.nodes:
        problems.append(f"--hosts: expected the names of {options.nodes} hosts, got {options.hosts or 'none'}")
    if options.scheduler != "slurm" and options.launcher == "srun":
        problems.append(f"--launcher: expected mpirun with --scheduler {options.scheduler}, got srun")
    launcher = options.launcher
    try:
        tasks = options.nodes * options.tasks_per_node
        reduce = settings.reduce
        launcher = choose_launcher(options.launcher, tasks, reduce.use_horovod, settings.torch_distributed is not None)
    except ConfigError as error:
        problems += error.problems
    if launcher == "torchrun" and options.nodes > 1 and options.scheduler != "slurm":
        problems.append(
            f"--scheduler: expected slurm for torchrun on several hosts, got {options.scheduler} (torch_distributed runs under "
            "mpirun, too: --launcher mpirun)"
        )
    if problems:
        raise ConfigError(problems)
    configs = [each if "/" in each or "." in each else f"./{each}" for each in options.configs]  # no command's name
    return Job(
        name=options.name or Path(options.configs[0]).stem,
        launcher=launcher,
        arguments=(*configs, *overrides),
        python=options.python,
        folder=str(Path.cwd()),
        written_by=f"python -m hvdtrain submit {shlex.join(given)}",
        nodes=options.nodes,
        tasks_per_node=options.tasks_per_node,
        gpus_per_node=options.gpus_per_node,
        cpus_per_task=options.cpus_per_task,
        memory=options.memory,
        seconds=seconds,
        stop_before=options.stop_before,
        requeue=not options.no_requeue and options.scheduler != "mpi",
        queue=options.queue,
        account=options.account,
        parallel_environment=options.parallel_environment,
        hosts=hosts,
        interface=options.interface,
        output=options.output,
        setup=tuple(options.setup),
        exports=tuple(options.export),
        options=tuple(options.option),
        doctor=options.doctor,
    )


def submit(script: str, command: list[str]) -> int:
    """Give the script to the scheduler; return the exit status."""
    if shutil.which(command[0]) is None:
        print(f"--submit: expected {command[0]} in PATH, got none (is this a login node of the cluster?)", file=sys.stderr)
        return 1
    done = subprocess.run(command, input=script, text=True)
    return 1 if done.returncode else 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("submit", DESCRIPTION, EPILOG, USAGE)
    add = parser.add_argument
    add("configs", metavar="CONFIG", nargs="+", help="the config of the training")
    add("--scheduler", choices=sorted(WRITERS), required=True, help="the scheduler; mpi: none, only mpirun and ssh")
    add("--launcher", choices=("python", "mpirun", "srun", "torchrun"), help="starts the ranks; default: by the config's keys")
    add("--nodes", type=int, default=1, help="hosts (default 1)")
    add("--tasks-per-node", type=int, default=1, help="ranks on each host (default 1)")
    add("--gpus-per-node", type=int, default=0, help="GPUs on each host, one for each rank (default 0)")
    add("--cpus-per-task", type=int, help="cores of a rank; sets OMP_NUM_THREADS, too")
    add("--memory", help="such as 64G; Slurm: per node, SGE: per slot")
    add("--time", help="time limit: hh:mm:ss, d-hh:mm:ss or minutes")
    add(
        "--stop-before",
        type=int,
        default=300,
        help="seconds before the time limit at which training stops with a checkpoint (300)",
    )
    add("--no-requeue", action="store_true", help="do not put a training that was stopped back into the queue")
    add("--name", help="name of the job; default: the config's")
    add("--queue", help="Slurm's partition, SGE's queue")
    add("--account", help="the account to charge")
    add("--parallel-environment", default="mpi", help="SGE's -pe (default mpi)")
    add("--hosts", default="", help="with --scheduler mpi: h1,h2")
    add("--interface", help="the network interface for NCCL, Gloo and mpirun, such as eth0")
    add("--output", default=".", help="folder for the job's output (default: this one)")
    add("--setup", action="append", default=[], metavar="LINE", help="a line of shell before anything else")
    add(
        "--export",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable that mpirun exports to all hosts, such as NCCL_DEBUG",
    )
    add("--option", action="append", default=[], metavar="LINE", help="a line for the scheduler: --option=--constraint=h100")
    add("--doctor", action="store_true", help="run hvdtrain doctor first; the job ends if it finds a problem")
    add("--python", default=sys.executable, help="the interpreter (default: this one)")
    add("--out", type=Path, metavar="FILE", help="write the script into FILE instead of printing it")
    add("--submit", action="store_true", help="submit the script (mpi: run it)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
