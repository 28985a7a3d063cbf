"""The command `hvdtrain submit CONFIG --scheduler slurm --nodes 2 ...`."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdtrain.config.command_line import command_parser, parse_command_line, split_overrides
from hvdtrain.errors import ConfigError, HvdtrainError, Problem, problem
from hvdtrain.plugins.submit.job import DEFAULT_CORES, Job, choose_launcher, parse_megabytes, parse_seconds
from hvdtrain.plugins.submit.schedulers import SCHEDULERS
from hvdtrain.plugins.submit.sweep import folder_problems, parse_sweep, run_model
from hvdtrain.plugins.submit.texts import text_problems
from hvdtrain.settings import Settings, read_settings

USAGE = """\
python -m hvdtrain submit CONFIG [CONFIG ...] --scheduler slurm|sge|pbs|lsf|mpi [options] [++KEY VALUE ...]
       python -m hvdtrain submit CONFIG [CONFIG ...] --scheduler kubernetes --image IMAGE [options] [++KEY VALUE ...]"""

DESCRIPTION = """\
Write the job script for a training (for Kubernetes, the manifest) and print it, or submit it with --submit. The config is
checked first, so its problems are reported before anything waits in a queue. Shortly before the time limit, the training stops
with a checkpoint, and the job goes back into the queue."""

EPILOG = """\
required
  CONFIG, --scheduler, and for several ranks ++use_horovod 1 or ++torch_distributed {} if the config sets neither
  kubernetes: also --image; mpi on several hosts: also --hosts
  most clusters also require --time, --memory and --queue or --account

exit status
  0  printed or submitted
  1  the scheduler refused the script
  2  a problem in the config or the options; nothing was submitted

The script runs in the current folder (--folder), with this Python (--python). --setup adds a line of shell that your cluster
needs, such as 'module load openmpi'; --option adds a line for the scheduler, such as '--constraint=h100'. Both may be repeated.
"""

OF_SCHEDULERS = {
    **dict.fromkeys(("--partition", "-p", "-q"), "--queue"),
    **dict.fromkeys(("--ntasks-per-node", "--ntasks", "-n"), "--tasks-per-node"),
    **dict.fromkeys(("--mem", "--mem-per-node"), "--memory"),
    **dict.fromkeys(("--gres", "--gpus", "--gpus-per-task"), "--gpus-per-node"),
    **dict.fromkeys(("--job-name", "-J", "-N"), "--name"),
    **dict.fromkeys(("--walltime", "-t"), "--time"),
    "-A": "--account",
    "-c": "--cpus-per-task",
}
"""By a scheduler's option, ours."""

AS_GIVEN = (
    "nodes", "tasks_per_node", "gpus_per_node", "stop_before", "max_restarts", "queue", "account", "parallel_environment",
    "interface", "doctor", "image",
)  # fmt: skip
"""Options that a `Job` has as they are."""

STARTUP_SECONDS = 180
"""The minimum of seconds before the stop signal: during start-up it kills the training, and Slurm may send it a minute early."""


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    words, overrides_given = split_overrides(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    try:
        configs, overrides = parse_command_line([*options.configs, *overrides_given])
        settings = read_settings(configs, overrides)
        runs = expand_sweep(options.sweep, configs, overrides, settings)
        job = build_job(options, settings, overrides_given, [*words, *overrides_given], runs)
    except HvdtrainError as error:
        print(error, file=sys.stderr)
        return 2
    script = job.scheduler.write(job)
    if options.out is not None:
        options.out.write_text(script, encoding="utf-8")
    if not options.submit:
        print(script, end="") if options.out is None else print(f"wrote {options.out}")
        return 0
    if not job.scheduler.in_container:
        Path(job.output).mkdir(parents=True, exist_ok=True)
    return submit(script, job.scheduler.submit)


def expand_sweep(
    sweep: Sequence[str], configs: Sequence[Path], overrides: Mapping[str, str], settings: Settings
) -> tuple[tuple[str, ...], ...]:
    """The arguments of each run of a sweep, after checking each config. Raises: ConfigError."""
    runs, problems = parse_sweep(sweep, overrides)
    if problems:
        raise ConfigError(problems)
    if not sweep:
        return ()
    models = [run_model(settings.run.model, run) for run in runs]
    problems = folder_problems(models)
    for run, model in zip(runs, models, strict=True):
        try:
            read_settings(configs, {**overrides, **run, "model": model})
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return tuple(
        (*(word for key, value in run.items() for word in (f"++{key}", value)), "++model", model)
        for run, model in zip(runs, models, strict=True)
    )


def build_job(
    options: argparse.Namespace,
    settings: Settings,
    overrides: list[str],
    words: list[str],
    runs: tuple[tuple[str, ...], ...] = (),
) -> Job:
    """The job for these options and this config. Raises: ConfigError, with all problems."""
    scheduler = SCHEDULERS[options.scheduler]
    seconds, wrong_time = convert_option("--time", options.time, parse_seconds, "hh:mm:ss, d-hh:mm:ss or minutes")
    memory, wrong_memory = convert_option(
        "--memory", options.memory, parse_megabytes, "an amount of each host such as 64G or 500M"
    )
    volumes = [text.partition(":") for text in options.volume]
    hosts = tuple(filter(None, options.hosts.split(",")))
    folder = options.folder or str(Path.cwd())
    launcher = options.launcher
    unconnected = []
    try:
        tasks = options.nodes * options.tasks_per_node
        transport = settings.torch_distributed
        launcher = choose_launcher(options.launcher, tasks, settings.reduce.use_horovod, transport is not None)
    except ConfigError as error:
        unconnected = error.problems
    # A path that could be taken for a command of hvdtrain or for an option gets a folder.
    configs = [path if ("/" in path or "." in path) and not path.startswith("-") else f"./{path}" for path in options.configs]
    job = Job(
        **{name: getattr(options, name) for name in AS_GIVEN},
        name=options.name or job_name(options.configs[0]),
        scheduler=scheduler,
        launcher=launcher,
        arguments=(*configs, *overrides),
        python=options.python or ("python" if scheduler.in_container else sys.executable),
        folder=f"./{folder}" if folder.startswith("-") else folder,
        written_by=f"python -m hvdtrain submit {shlex.join(words)}",
        cpus_per_task=options.cpus_per_task or scheduler.cores,
        memory=memory,
        seconds=seconds,
        requeue=not options.no_requeue and scheduler.requeues,
        hosts=hosts,
        output=options.output or ".",
        setup=tuple(options.setup),
        exports=tuple(options.export),
        options=tuple(options.option),
        volumes=tuple((claim, path) for claim, _, path in volumes),
        runs=runs,
    )
    texts = script_texts(options, overrides) | {"--hosts": list(hosts), "--folder": [folder]}
    problems = [*number_problems(options), *wrong_time, *wrong_memory]
    problems += [
        Problem.of("conflict", f"--{name}: expected another scheduler, got {scheduler.name}, which has no such option")
        for name in scheduler.unsupported
        if getattr(options, name)
    ]
    problems += text_problems(texts, scheduler.in_comments)
    problems += [
        Problem.of("wrong-format", f"--volume: expected CLAIM:/PATH, got {f'{claim}:{path}' if path else claim}")
        for claim, _, path in volumes
        if not claim or not path.startswith("/")
    ]
    problems += [*unconnected, *job_problems(job), *scheduler.problems(job)]
    if problems:
        raise ConfigError(problems)
    return job


def number_problems(options: argparse.Namespace) -> list[Problem]:
    """Problems with numeric options."""
    problems = [
        Problem.of("out-of-range", f"--{name.replace('_', '-')}: expected a positive number, got {value}")
        for name in ("nodes", "tasks_per_node", "cpus_per_task", "stop_before")
        if (value := getattr(options, name)) is not None and value < 1
    ]
    problems += [
        Problem.of("out-of-range", f"--{name.replace('_', '-')}: expected zero or a positive number, got {value}")
        for name in ("max_restarts", "gpus_per_node")
        if (value := getattr(options, name)) < 0
    ]
    if 0 < options.gpus_per_node < options.tasks_per_node:
        problems += problem(
            "out-of-range",
            f"--gpus-per-node: expected one for each of {options.tasks_per_node} ranks of a node, got {options.gpus_per_node}",
        )
    return problems


def convert_option(option: str, text: str | None, convert: Callable[[str], int], rule: str) -> tuple[int | None, list[Problem]]:
    """The value of an option, None if it is not given, and the problem with it."""
    try:
        return None if text is None else convert(text), []
    except ValueError:
        return None, problem("wrong-format", f"{option}: expected {rule}, got {text!r}")


def job_problems(job: Job) -> list[Problem]:
    """Conflicts between the options of a job, and between them and its scheduler."""
    problems = []
    scheduler = job.scheduler
    if job.seconds is not None and job.seconds < job.stop_before + STARTUP_SECONDS:
        problems += problem(
            "out-of-range",
            f"--stop-before: expected at least {STARTUP_SECONDS} s less than --time ({job.seconds} s), for starting, got "
            f"{job.stop_before}",
        )
    if job.launcher == "srun" and not scheduler.has_srun:
        problems += problem("conflict", f"--launcher: expected mpirun with --scheduler {scheduler.name}, got srun")
    if job.max_restarts > 0 and not (job.launcher == "torchrun" and scheduler.has_srun):
        problems += problem(
            "conflict",
            f"--max-restarts: expected torchrun (++torch_distributed {{}}) and --scheduler slurm, got {job.launcher} and "
            f"{scheduler.name} (on one host: ++ngpu N ++max_restarts N in place of --tasks-per-node)",
        )
    if job.launcher == "torchrun" and job.nodes > 1 and not (scheduler.has_srun or scheduler.in_container):
        problems += problem(
            "conflict",
            f"--scheduler: expected slurm or kubernetes for torchrun on several hosts, got {scheduler.name} "
            "(torch_distributed runs under mpirun, too: --launcher mpirun)",
        )
    if job.runs and scheduler.array_index is None:
        names = ", ".join(name for name, scheduler in SCHEDULERS.items() if scheduler.array_index is not None)
        problems += problem(
            "conflict",
            f"--sweep: expected a scheduler with job arrays ({names}), got {scheduler.name} (a loop over hvdtrain.train in "
            "Python does it, docs/python_api.md)",
        )
    elif job.runs and job.max_restarts:
        problems += problem("conflict", f"--sweep: expected no --max-restarts, got {job.max_restarts}")
    return problems


def script_texts(options: argparse.Namespace, overrides: list[str]) -> dict[str, list[str]]:
    """All values of the command line that become part of the script, by option or key."""
    texts = {
        f"--{name.replace('_', '-')}": [value] if isinstance(value, str) else value
        for name, value in vars(options).items()
        if value and isinstance(value, str | list) and name != "configs"
    }
    texts["CONFIG"] = options.configs
    key = "++"
    for word in overrides:
        if word.startswith("++"):
            key = word if word.isprintable() else "++KEY"
        texts.setdefault(key, []).append(word)
    return texts


def job_name(config: str) -> str:
    """The default name of a job, derived from its config.

    >>> job_name("my configs/large (2).py"), job_name("-.py")
    ('large-2', 'hvdtrain')
    """
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", Path(config).stem).strip("-.+") or "hvdtrain"


def submit(script: str, command: Sequence[str]) -> int:
    """Submit the script to the scheduler; return the exit status."""
    if shutil.which(command[0]) is None:
        print(f"--submit: expected {command[0]} in PATH, got none (is this a login node of the cluster?)", file=sys.stderr)
        return 1
    done = subprocess.run(command, input=script, text=True)
    return 1 if done.returncode else 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    result = command_parser("submit", DESCRIPTION, EPILOG, USAGE)
    result.instead = OF_SCHEDULERS
    result.otherwise = "one of the scheduler --option={}={}"
    add = result.add_argument_group("required").add_argument
    add("configs", metavar="CONFIG", nargs="+", help="the config of the training")
    add("--scheduler", choices=list(SCHEDULERS), required=True, help="the scheduler; mpi: none, only mpirun and ssh")
    add("--image", help="with --scheduler kubernetes: a container image with hvdtrain")
    add("--hosts", default="", help="with --scheduler mpi and several hosts: h1,h2")
    add = result.add_argument_group("ranks and resources, which are per host, except --nodes and --cpus-per-task").add_argument
    add("--nodes", type=int, default=1, help="hosts; Kubernetes: pods (default 1)")
    add("--tasks-per-node", type=int, default=1, help="ranks on each host (default 1)")
    add("--gpus-per-node", type=int, default=0, help="GPUs of each host, one for each rank (default 0)")
    add(
        "--cpus-per-task",
        type=int,
        help=f"cores of each rank, and OMP_NUM_THREADS (default {DEFAULT_CORES}; SGE: 1; mpi: a share of the host's)",
    )
    add("--memory", help="memory of each host, such as 64G (1024**3 bytes), with every scheduler; default: the cluster's")
    add(
        "--launcher",
        choices=("python", "mpirun", "srun", "torchrun"),
        help="starts the ranks; default: the one for the config's keys",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="Slurm and torchrun: restart the ranks up to N times after one was lost, if necessary without its node (default 0)",
    )
    add("--interface", help="the network interface for NCCL, Gloo and mpirun, such as eth0")
    add = result.add_argument_group("time").add_argument
    add("--time", help="time limit: hh:mm:ss, d-hh:mm:ss or minutes; default: the cluster's, which is unknown to the training")
    add("--stop-before", type=int, default=300, help="stop with a checkpoint this many seconds before the limit (default 300)")
    add("--no-requeue", action="store_true", help="do not put a stopped training back into the queue")
    add = result.add_argument_group("the scheduler").add_argument
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="a job array with a run for each value, each with a separate model folder; several: all combinations",
    )
    add("--name", help="name of the job; default: the config's")
    add("--queue", help="the queue; Slurm: the partition")
    add("--account", help="the account to charge; LSF: the project; Kubernetes: the namespace")
    add("--parallel-environment", default="mpi", help="SGE's -pe (default mpi)")
    add("--output", help="folder for the job's output (default: the current one)")
    add("--option", action="append", default=[], metavar="LINE", help="a line for the scheduler: --option=--constraint=h100")
    add("--volume", action="append", default=[], metavar="CLAIM:/PATH", help="Kubernetes: a claim, and where it is mounted")
    add = result.add_argument_group("the script").add_argument
    add("--folder", help="where the job runs (default: the current folder); Kubernetes: a folder of the container or of a volume")
    add("--python", help="the interpreter (default: this one; Kubernetes: python)")
    add("--setup", action="append", default=[], metavar="LINE", help="a line of shell to run first")
    add(
        "--export",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable that mpirun exports to all hosts, such as NCCL_DEBUG",
    )
    add("--doctor", action="store_true", help="run hvdtrain doctor first, and end the job if it finds a problem")
    add("--out", type=Path, metavar="FILE", help="write the script into FILE instead of printing it")
    add("--submit", action="store_true", help="submit the script (mpi: run it)")
    return result
