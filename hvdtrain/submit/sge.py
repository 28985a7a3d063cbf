"""Job scripts for SGE and its successors."""

from __future__ import annotations

from hvdtrain.submit.commands import STOPPED, command, environment_lines, waiting
from hvdtrain.submit.job import Job, clock

RESCHEDULE = 99
"""SGE puts a job that ends with this back into the queue."""


def sge_script(job: Job) -> str:
    """A script for qsub."""
    return "\n".join(["#!/bin/bash", *head(job), "", f"# {job.written_by}", "", *body(job)]) + "\n"


def head(job: Job) -> list[str]:
    """What qsub reads. Resources are per slot, which is a rank."""
    lines = ["#$ -S /bin/bash", f"#$ -N {job.name}", f"#$ -wd {job.folder}", "#$ -j y", f"#$ -o {job.output}/"]
    if job.tasks > 1:
        lines.append(f"#$ -pe {job.parallel_environment} {job.tasks}")
    if job.seconds:
        soft = max(60, job.seconds - job.stop_before)
        lines += ["# SIGUSR1 comes at s_rt:", f"#$ -l h_rt={clock(job.seconds)} -l s_rt={clock(soft)}"]
    if job.gpus_per_node:
        lines += ["# For each slot, which is a rank:", f"#$ -l gpu={max(1, job.gpus_per_node // job.tasks_per_node)}"]
    if job.memory:
        lines += ["# For each slot; mapped HDF files and CUDA's address space count:", f"#$ -l h_vmem={job.memory}"]
    if job.queue:
        lines.append(f"#$ -q {job.queue}")
    if job.account:
        lines.append(f"#$ -A {job.account}")
    if job.seconds or job.requeue:
        lines += ["# SIGUSR2 comes before the job is killed:", "#$ -notify"]
    lines.append(f"#$ -r {'y' if job.requeue else 'n'}")
    return [*lines, *(f"#$ {option}" for option in job.options)]


def body(job: Job) -> list[str]:
    """What runs on the job's first host. An Open MPI that was built for SGE learns the hosts from it."""
    lines = environment_lines(job)
    if job.doctor:
        lines += ["", f"{command(job, 'hvdtrain.doctor', extra=['--no-measure'])} || exit"]
    lines += ["", "set -m  # a process group of its own: signals come to this script alone, which passes one on"]
    lines += [*waiting(job, command(job), soon="USR1", cancelled="USR2 TERM"), ""]
    if job.requeue:
        lines.append(f"if [ $status = {STOPPED} ] && [ $cancelled = no ]; then")
        lines.append(f"    exit {RESCHEDULE}  # SGE puts the job back into the queue; it goes on where it stopped")
        lines.append("fi")
    return [*lines, "exit $status"]
