"""The command `hvdtrain prove CONFIG --ranks 1,2,3`; also `python -m hvdtrain.prove`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hvdtrain.cli import exit_status
from hvdtrain.comm import launch
from hvdtrain.config.source import command_parser, parse_command_line, split_overrides
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.prove.causes import Case
from hvdtrain.prove.compare import compare
from hvdtrain.prove.launches import TRANSPORTS, Run, keys_for, start, unavailable
from hvdtrain.prove.parts import Probe
from hvdtrain.prove.record import Record
from hvdtrain.prove.report import cause_lines, difference_lines, table_lines
from hvdtrain.prove.training import Task, run_task
from hvdtrain.settings import Settings, read_settings

USAGE = "python -m hvdtrain prove CONFIG [CONFIG ...] [options] [++KEY VALUE ...]"

DESCRIPTION = """\
Train some steps of the config on each number of ranks with the same global batches, and say whether losses, gradients and
weights agree, and to which digit; where they do not, the first step and the first parameter that differ, and the causes.
The ranks are started on this host, as the training would start them; nothing is written but into a temporary folder."""

EPILOG = """\
exit status, for scripts
  0  all runs agree
  1  they differ
  2  a problem in the config or the options
  the status of a run that failed, after its own message
"""

DIAGNOSIS = "diagnosis"
"""The name of the run that looks for causes."""

TOLERANCE, TOLERANCE_HALF = 1e-3, 2e-2
"""Relative differences that count as rounding errors, computing in float32 and in half precision. Most are below 1e-6, but Adam
divides every element of a gradient by its size: it makes steps of those that are nothing but rounding errors."""


@dataclass(frozen=True)
class Job:
    """What is to be proved.

    Attributes:
        runs: in the order of the report; the first is the measure of the others.
        arguments: the configs and overrides.
    """

    settings: Settings
    runs: list[Run]
    arguments: list[str]
    steps: int
    tolerance: float
    dropout: bool


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    given, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    wanted = [*options.configs, *overrides]
    if options.task is not None:
        return exit_status(lambda: _on_a_rank(wanted, options.task), "interrupted")
    try:
        job = job_of(options, wanted)
    except HvdtrainError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-prove-") as folder:
            return prove(job, Path(folder))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    made = command_parser("prove", DESCRIPTION, EPILOG, USAGE)
    add = made.add_argument
    add("configs", metavar="CONFIG", nargs="+", help="the config of the training")
    add("--ranks", default="1,2,3", help="numbers of ranks (default 1,2,3); the first is the measure of the others")
    add("--steps", type=int, default=10, help="steps to train (default 10)")
    add("--transport", help="horovod, torch or horovod,torch (default: those that are installed and go with the framework)")
    help = f"relative difference that counts as a rounding error (default {TOLERANCE:g}, in half precision {TOLERANCE_HALF:g})"
    add("--tolerance", type=float, help=help)
    add("--without-dropout", action="store_true", help="switch dropout off in all modules of the model")
    add("--task", type=Path, help=argparse.SUPPRESS)  # what the ranks that this command starts have to do
    return made


def _on_a_rank(wanted: list[str], file: Path) -> None:
    """Collective. What the command's own ranks do. Raises: HvdtrainError."""
    try:
        settings = read_settings(*parse_command_line(wanted))
    except ConfigError as error:
        error.on_every_rank = True
        raise
    run_task(settings, Task(**json.loads(file.read_text())))


def job_of(options: argparse.Namespace, wanted: list[str]) -> Job:
    """What the options and the config ask for. Raises: ConfigError, with all problems."""
    settings = read_settings(*parse_command_line(wanted))
    problems = []
    started = launch.launch()
    if started.launcher is not None:
        problems.append(f"prove: expected to start the ranks itself, got a process that {started.launcher} started")
    sizes = [int(word) if word.strip().isdigit() else 0 for word in options.ranks.split(",")]
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        problems.append(f"--ranks: expected different positive numbers such as 1,2,3, got {options.ranks!r}")
    if options.steps < 1:
        problems.append(f"--steps: expected a positive number, got {options.steps}")
    if options.tolerance is not None and not options.tolerance > 0:
        problems.append(f"--tolerance: expected a positive number, got {options.tolerance:g}")
    asked = None if options.transport is None else [word.strip() for word in options.transport.split(",")]
    reasons = {name: unavailable(name, settings.run.backend) for name in asked or TRANSPORTS if name in TRANSPORTS}
    for name in asked or []:
        if name not in TRANSPORTS:
            problems.append(f"--transport: expected horovod, torch or horovod,torch, got {name!r}")
        elif reasons[name] is not None:
            problems.append(f"--transport: expected a way to connect ranks here, got {name}, with {reasons[name]}")
    there = [name for name, reason in reasons.items() if reason is None]
    if asked is None and not there:
        found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        problems.append(f"--transport: expected at least one, got none that works here ({found})")
    runs = [Run(name, size) for size in sizes for name in ([None] if size == 1 else there)]
    if len(runs) < 2 and not problems:
        problems.append(f"--ranks: expected at least two numbers of ranks, or two transports, got {options.ranks}")
    if problems:
        raise ConfigError(problems)
    half = settings.precision.precision().dtype != "float32"
    tolerance = options.tolerance or (TOLERANCE_HALF if half else TOLERANCE)
    return Job(settings, runs, wanted, options.steps, tolerance, not options.without_dropout)


def prove(job: Job, folder: Path) -> int:
    """Do all runs, compare them, and print the result; return the exit status."""
    in_order = sorted(job.runs, key=lambda run: -run.size)  # the largest number of ranks chooses the batches
    for number, run in enumerate(in_order, 1):
        status = _launched(job, run, _task(job, folder, run.name), f"run {number} of {len(in_order)}: {run}")
        if status:
            return status
    records = {run: Record.load(folder / f"{run.name}.npz") for run in job.runs}
    first, *others = job.runs
    cases = []
    for run in others:
        comparison = compare(records[run], records[first], job.tolerance)
        cases.append(Case(str(run), records[run], records[first], comparison, job.tolerance, job.settings))
    apart = [f"{run}: {record.apart} is not the same on all ranks" for run, record in records.items() if record.apart]
    differing = {run: case for run, case in zip(others, cases, strict=True) if not case.comparison.agree}
    if differing:
        status = _diagnose(job, folder, differing)
        if status:
            return status
    print("\n".join(table_lines(records[first], str(first), cases, job.dropout)))
    for case in differing.values():
        print("\n".join(difference_lines(case)))
    if differing:
        print("\n".join(cause_lines(list(differing.values()))))
    print("".join(f"{line}\n" for line in apart), end="")
    agree = not differing and not apart
    print(f"prove: {'all runs agree' if agree else 'the runs differ'}")
    return 0 if agree else 1


def _diagnose(job: Job, folder: Path, differing: dict[Run, Case]) -> int:
    """One rank looks for causes, and adds to the cases what it finds; the exit status."""
    several = {run: run if run.size > 1 else job.runs[0] for run in differing}
    chosen = {run.size: run.name for run in several.values()}  # what one rank computes is the same for all transports
    task = replace(_task(job, folder, DIAGNOSIS), diagnose=list(chosen.values()))
    status = _launched(job, Run(None, 1), task, "they differ; looking for the causes on 1 rank")
    if status:
        return status
    probe = Probe(**json.loads((folder / f"{DIAGNOSIS}.json").read_text()))
    for run, case in differing.items():
        accumulated = Record.load(folder / f"{DIAGNOSIS}-{chosen[several[run].size]}.npz")
        differing[run] = replace(case, accumulated=accumulated, probe=probe)
    return 0


def _task(job: Job, folder: Path, name: str) -> Task:
    return Task(str(folder), name, job.steps, str(folder / "batches.npz"), job.dropout)


def _launched(job: Job, run: Run, task: Task, title: str) -> int:
    """Have the ranks of a run do a task; the exit status. What they print is theirs."""
    print(f"prove: {title} ...", flush=True)
    began = time.monotonic()
    file = Path(task.folder, f"{task.name}.task")
    file.write_text(json.dumps(asdict(task)))
    status = start(run, ["prove", "--task", str(file), *job.arguments], keys_for(run, job.settings))
    if status:
        print(f"prove: failed with status {status}: {title}", file=sys.stderr)
    else:
        print(f"prove: done in {time.monotonic() - began:.0f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
