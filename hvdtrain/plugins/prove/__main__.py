"""The command `hvdtrain prove CONFIG --ranks 1,2,3`.

First come the options, the runs and their comparison; then starting the ranks of a run: one rank alone, several under mpirun for
Horovod, or by hvdtrain itself for torch.distributed; then the report: a table of how far the runs agree, and where and why they
differ.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap

from hvdtrain.cli import exit_status
from hvdtrain.comm import this_process
from hvdtrain.comm.keys import LaunchKeys
from hvdtrain.comm.launchers import Place
from hvdtrain.config.command_line import command_parser, parse_command_line, split_overrides
from hvdtrain.errors import ConfigError, HvdtrainError, problem
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.plugins.local_ranks.processes import launch
from hvdtrain.plugins.prove.causes import Case, causes, describe_exchange
from hvdtrain.plugins.prove.compare import Agreement, Record, compare, distance_words, means
from hvdtrain.plugins.prove.training import BATCHES, GlobalBatches, Task, run_task, written
from hvdtrain.report.starts import ranks_text
from hvdtrain.settings import Settings, read_settings, with_datasets

USAGE = "python -m hvdtrain prove CONFIG [CONFIG ...] [options] [++KEY VALUE ...]"

DESCRIPTION = """\
Train some steps of the config on each number of ranks with the same global batches, and report whether losses, gradients and
weights agree, and to which digit; if they do not, the first step and the first parameter that differ, and the causes.
The ranks are started on this host, as for the training; files are written only to a temporary folder."""

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
"""Relative differences that count as rounding errors, in float32 and in half precision. Most are below 1e-6, but Adam divides
every element of a gradient by its size, so that it makes full steps of elements that are only rounding errors."""

TRANSPORTS = {"horovod": "Horovod", "torch": "torch.distributed"}
"""By name in the command, the name in the report."""

RENDEZVOUS_ENTRIES = ("init_method", "rank", "world_size")
"""Entries of torch_distributed by which the training's processes find each other, not those of this command."""

WIDTH = 120
"""The width of the report's text, in columns."""


@dataclass(frozen=True)
class Run:
    """One training: its transport (None: one rank needs none), and its number of ranks."""

    transport: str | None
    size: int

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.transport or 'alone'}-{self.size}"

    def __str__(self) -> str:
        ranks = ranks_text(self.size)
        return ranks if self.transport is None else f"{ranks} over {TRANSPORTS[self.transport]}"


@dataclass(frozen=True)
class Job:
    """The proof to make.

    Attributes:
        runs: in the order of the report; the first is the reference for the others.
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
    words, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    wanted = [*options.configs, *overrides]
    if options.task is not None:
        return exit_status(lambda: _run_on_rank(wanted, options.task), "interrupted")
    try:
        job = parse_job(options, wanted)
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
    result = command_parser("prove", DESCRIPTION, EPILOG, USAGE)
    add = result.add_argument
    add("configs", metavar="CONFIG", nargs="+", help="the config of the training")
    add("--ranks", default="1,2,3", help="numbers of ranks (default 1,2,3); the first is the reference for the others")
    add(
        "--steps",
        type=int,
        default=10,
        help="steps to train (default 10): the first half at the start of an epoch, the second half at its end",
    )
    add("--transport", help="horovod, torch or horovod,torch (default: those that are installed and support the framework)")
    help = f"relative difference that counts as a rounding error (default {TOLERANCE:g}, in half precision {TOLERANCE_HALF:g})"
    add("--tolerance", type=float, help=help)
    add("--without-dropout", action="store_true", help="switch dropout off in all modules of the model")
    add("--task", type=Path, help=argparse.SUPPRESS)  # the task of the ranks that this command starts
    return result


def _run_on_rank(wanted: list[str], file: Path) -> None:
    """Collective. Run a task on a rank that this command started. Raises: HvdtrainError."""
    try:
        settings = with_datasets(read_settings(*parse_command_line(wanted)))
    except ConfigError as error:
        raise error.on_all_ranks() from error.__cause__
    run_task(settings, written(file))


def parse_job(options: argparse.Namespace, wanted: list[str]) -> Job:
    """The job for the options and the config. Raises: ConfigError, with all problems."""
    settings = with_datasets(read_settings(*parse_command_line(wanted)))
    problems = []
    place = this_process.place()
    if place.launcher is not None:
        problems += problem("conflict", f"prove: expected to start the ranks itself, got a process that {place.launcher} started")
    sizes = [int(word) if word.strip().isdigit() else 0 for word in options.ranks.split(",")]
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        problems += problem("out-of-range", f"--ranks: expected different positive numbers such as 1,2,3, got {options.ranks!r}")
    if options.steps < 1:
        problems += problem("out-of-range", f"--steps: expected a positive number, got {options.steps}")
    if options.tolerance is not None and not options.tolerance > 0:
        problems += problem("out-of-range", f"--tolerance: expected a positive number, got {options.tolerance:g}")
    requested = None if options.transport is None else [word.strip() for word in options.transport.split(",")]
    reasons = {name: unavailable_reason(name, settings.run.backend) for name in requested or TRANSPORTS if name in TRANSPORTS}
    for name in requested or []:
        if name not in TRANSPORTS:
            problems += problem("unknown-value", f"--transport: expected horovod, torch or horovod,torch, got {name!r}")
        elif reasons[name] is not None:
            problems += problem(
                "unavailable", f"--transport: expected a way to connect ranks here, got {name}, with {reasons[name]}"
            )
    available = [name for name, reason in reasons.items() if reason is None]
    if requested is None and not available:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        problems += problem("unavailable", f"--transport: expected at least one, got none that works here ({why})")
    runs = [Run(name, size) for size in sizes for name in ([None] if size == 1 else available)]
    if len(runs) < 2 and not problems:
        problems += problem(
            "out-of-range", f"--ranks: expected at least two numbers of ranks, or two transports, got {options.ranks}"
        )
    if problems:
        raise ConfigError(problems)
    half = settings.precision.precision().dtype != "float32"
    tolerance = options.tolerance or (TOLERANCE_HALF if half else TOLERANCE)
    return Job(settings, runs, wanted, options.steps, tolerance, not options.without_dropout)


def prove(job: Job, folder: Path) -> int:
    """Execute all runs, compare them, and print the result; return the exit status."""
    in_order = sorted(job.runs, key=lambda run: -run.size)  # the largest number of ranks chooses the batches
    for number, run in enumerate(in_order, 1):
        task = Task(folder, run.name, job.steps, job.dropout)
        status = _launch(job, run, task, f"run {number} of {len(in_order)}: {run}")
        if status:
            return status
    records: dict[Run, Record] = {run: written(folder / run.name) for run in job.runs}
    first, *others = job.runs
    cases = []
    for run in others:
        comparison = compare(records[run], records[first], job.tolerance)
        cases.append(Case(str(run), records[run], records[first], comparison, job.tolerance, job.settings))
    unequal = [f"{run}: {record.apart} is not the same on all ranks" for run, record in records.items() if record.apart]
    differing = {run: case for run, case in zip(others, cases, strict=True) if not case.comparison.agree}
    if differing:
        status = _diagnose(job, folder, differing)
        if status:
            return status
    batches = written(folder / BATCHES)
    print("\n".join(table_lines(records[first], str(first), cases, job.dropout, batches)))
    for case in differing.values():
        print("\n".join(difference_lines(case)))
    if differing:
        print("\n".join(cause_lines(list(differing.values()))))
    print("".join(f"{line}\n" for line in unequal), end="")
    print("\n".join(wrap(f"not covered: {describe_gaps(job, records[first], batches)}", WIDTH, subsequent_indent="  ")))
    agree = not differing and not unequal
    print(f"prove: {'all runs agree' if agree else 'the runs differ'}")
    return 0 if agree else 1


def _diagnose(job: Job, folder: Path, differing: dict[Run, Case]) -> int:
    """Look for causes on one rank, and add the findings to the cases; return the exit status."""
    several = {run: run if run.size > 1 else job.runs[0] for run in differing}
    chosen = {run.size: run.name for run in several.values()}  # one rank computes the same for all transports
    task = Task(folder, DIAGNOSIS, job.steps, job.dropout, diagnose=list(chosen.values()))
    status = _launch(job, Run(None, 1), task, "they differ; looking for the causes on 1 rank")
    if status:
        return status
    probe = written(folder / DIAGNOSIS)
    for run, case in differing.items():
        accumulated = written(folder / f"{DIAGNOSIS}-{chosen[several[run].size]}")
        differing[run] = replace(case, accumulated=accumulated, probe=probe)
    return 0


def _launch(job: Job, run: Run, task: Task, title: str) -> int:
    """Run a task on the ranks of a run, which print to the terminal; return the exit status."""
    print(f"prove: {title} ...", flush=True)
    began = time.monotonic()
    file = task.folder / f"{task.name}.task"
    file.write_bytes(pickle.dumps(task))
    status = start(run, ["prove", "--task", str(file), *job.arguments], run_overrides(run, job.settings))
    if status:
        print(f"prove: failed with status {status}: {title}", file=sys.stderr)
    else:
        print(f"prove: done in {time.monotonic() - began:.0f} s", flush=True)
    return status


def unavailable_reason(transport: str, backend: str) -> str | None:
    """Why a transport cannot connect ranks of a framework on this host; None: it can. Imports nothing."""
    if transport == "torch":
        return (
            None if "torch.distributed" in FRAMEWORKS[backend].features else f"backend = {backend!r}, which it does not connect"
        )
    spec = find_spec("horovod")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not any(list(Path(folder, backend).glob("mpi_lib*.so")) for folder in folders):
        return f"no Horovod that was built for {backend} (python -m hvdtrain build-horovod)"
    return None if shutil.which("mpirun") else "no mpirun in PATH"


def run_overrides(run: Run, settings: Settings) -> dict[str, str]:
    """The overrides for a run, which replace the config's choice of processes."""
    keys = {"use_horovod": str(run.transport == "horovod"), "torch_distributed": "None"}
    if run.transport == "torch":
        entries = settings.reduce.torch_distributed or {}
        entries_to_keep = {name: value for name, value in entries.items() if name not in RENDEZVOUS_ENTRIES}
        keys["torch_distributed"] = repr(entries_to_keep)
    for field in fields(LaunchKeys):
        if getattr(settings.launch, field.name) != field.default:
            keys[field.name] = str(field.default)
    if settings.launch.ngpu == 0:
        keys["device"] = "cpu"
    return keys


def start(run: Run, arguments: Sequence[str], keys: Mapping[str, str]) -> int:
    """Start the ranks, which print to the terminal, and wait for them; return the exit status.

    Args:
        arguments: the arguments of hvdtrain.
        keys: overrides to append.
    """
    program = [*arguments, *(word for name, value in keys.items() for word in (f"++{name}", value))]
    if run.transport != "horovod":
        wanted = [Place("hvdtrain", rank, run.size, rank, run.size) for rank in range(run.size)]
        return launch(wanted, program, this_process.environment())
    command = ["mpirun", "-np", str(run.size), "--bind-to", "none", "--oversubscribe", sys.executable, "-m", "hvdtrain", *program]
    process = subprocess.Popen(command, env=dict(this_process.environment()), stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except KeyboardInterrupt:  # mpirun also receives it, and ends the ranks
        process.wait()
        raise


def _begin(first: Record, batches: GlobalBatches) -> int:
    """The number of steps before the stop, which happens at the end of an update."""
    return len(first.losses) - batches.end


def describe_gaps(job: Job, first: Record, batches: GlobalBatches) -> str:
    """The parts of a training that were not trained or compared."""
    parts = []
    begin = _begin(first, batches)
    if (end := batches.steps - batches.end) > begin:
        between = f"steps {begin + 1} to {end}" if begin + 1 < end else f"step {end}"
        parts.append(f"{between} (--steps {batches.steps} trains all)")
    if not batches.end:
        parts.append("the end of the epoch and a resume (--steps 2 or more)")
    if not job.dropout:
        parts.append("dropout")
    if job.settings.reduce.dataset_distribution != "shard":
        parts.append("a different order on each rank")
    parts.append(
        "later epochs, evaluation, buffers such as BatchNorm's averages, a resume on another number of ranks, other hosts"
    )
    return ", ".join(parts)


def table_lines(first: Record, name: str, cases: Sequence[Case], dropout: bool, batches: GlobalBatches) -> list[str]:
    """How far each run agrees with the first.

    Args:
        first, name: the first run.
        dropout: whether it was left on.
        batches: the trained batches.
    """
    head = f"{len(first.losses)} steps of {_span(first.num_sequences)} sequences, {len(first.rates)} updates"
    places = f"steps 1 to {_begin(first, batches)}"
    if batches.end:
        places += f", a stop and a resume, steps {batches.steps - batches.end + 1} to {batches.steps}"
    where = f"{places} of the {batches.steps} of an epoch on {batches.ranks} ranks"
    lines = [f"{head}: {where}{'' if dropout else '; dropout is switched off'}", ""]
    rows = [[f"compared with {name}", "losses", "gradients", "weights", ""]]
    for case in cases:
        comparison = case.comparison
        words = [agreement.words for agreement in (comparison.losses, comparison.gradients, comparison.weights)]
        rows.append([case.name, *words, "agree" if comparison.agree else "differ"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    aside = dict.fromkeys(name for case in cases for name in case.comparison.set_aside)
    if aside:
        lines += ["", f"not compared, as their gradients are rounding errors that the optimizer enlarges: {', '.join(aside)}"]
    return [*lines, ""]


def difference_lines(case: Case) -> list[str]:
    """Where a run differs."""
    comparison = case.comparison
    lines = [f"{case.name}: beyond the tolerance of {case.tolerance:g}"]
    if comparison.losses.first is not None:
        step = comparison.losses.first.number
        name = comparison.losses.first.name
        values = [means(record.losses[step - 1]).get(name) for record in (case.record, case.reference)]
        shown = " instead of ".join("nothing" if value is None else f"{value:.7g}" for value in values)
        lines.append(f"  losses     first in step {step}, {name}: {shown}")
    lines += _parameter_lines("gradients", comparison.gradients)
    lines += _parameter_lines("weights", comparison.weights)
    return [*lines, ""]


def cause_lines(cases: Sequence[Case]) -> list[str]:
    """Why runs differ. A cause that does not apply to all of them names those to which it applies."""
    names: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for cause in causes(case):
            names.setdefault(("cause", cause), []).append(case.name)
        exchange = describe_exchange(case)
        if exchange is not None:
            names.setdefault(("checked", exchange), []).append(case.name)
    lines = []
    for (kind, sentence), affected in sorted(names.items(), key=lambda item: item[0][0] == "checked"):
        text = sentence if len(affected) == len(cases) or kind == "checked" else f"{', '.join(affected)}: {sentence}"
        lines += wrap(f"{kind}: {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [*lines, ""]


def _parameter_lines(kind: str, agreement: Agreement) -> list[str]:
    first, largest = agreement.first, agreement.largest
    if first is None or largest is None:
        return []
    where = f"update {first.number}" if first.number else "the beginning"
    when = "after" if kind == "weights" and first.number else "in"
    line = f"  {kind:9}  first {when} {where}, {first.name}: {distance_words(first.distance)}"
    if (largest.number, largest.name) != (first.number, first.name):
        line += f"; most in update {largest.number}, {largest.name}: {distance_words(largest.distance)}"
    return [line]


def _span(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
