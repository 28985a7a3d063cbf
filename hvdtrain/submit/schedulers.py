"""Job scripts for Slurm, for SGE and its successors, and for hosts without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.submit.commands import STOPPED, command, doctor_lines, environment_lines, waiting
from hvdtrain.submit.job import Job, clock

RESCHEDULE = 99
"""SGE puts a job that ends with this exit status back into the queue."""


def slurm_script(job: Job) -> str:
    """A script for sbatch."""
    return _script(job, slurm_head(job), slurm_body(job))


def slurm_head(job: Job) -> list[str]:
    """The options for sbatch."""
    agents = job.launcher == "torchrun"  # one task per node, which starts the ranks there
    cores = (job.cpus_per_task or 1) * job.tasks_per_node if agents else job.cpus_per_task
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1 if agents else job.tasks_per_node,
        "cpus-per-task": cores,
        "gpus-per-node": job.gpus_per_node or None,
        "mem": job.memory,
        "time": clock(job.seconds) if job.seconds else None,
        "partition": job.queue,
        "account": job.account,
        "output": f"{job.output}/{job.name}-%j.out",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    if job.seconds:
        lines.append(f"#SBATCH --signal=B:USR1@{job.stop_before}  # to this script, {job.stop_before} s before the time limit")
    if job.requeue:
        lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append  # one log, also after a requeue"]
    return [*lines, *(f"#SBATCH {option}" for option in job.options)]


def slurm_body(job: Job) -> list[str]:
    """What runs on the job's first node."""
    lines = environment_lines(job)
    if job.launcher in ("srun", "torchrun"):
        lines.append('export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun does not take it from sbatch')
    if job.launcher == "torchrun" and job.nodes > 1:
        lines += [
            'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 20000))  # another one than other jobs on this node",
        ]
    lines += doctor_lines(job)
    lines += ["", *waiting(job, command(job), soon="USR1", cancelled="TERM"), ""]
    if job.requeue:
        lines += _if_stopped('scontrol requeue "$SLURM_JOB_ID"  # training continues where it stopped')
    return [*lines, "exit $status"]


def sge_script(job: Job) -> str:
    """A script for qsub."""
    return _script(job, sge_head(job), sge_body(job))


def sge_head(job: Job) -> list[str]:
    """The options for qsub. Resources are per slot, which is a rank."""
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


def sge_body(job: Job) -> list[str]:
    """What runs on the job's first host. An Open MPI that was built with SGE's support gets the hosts from SGE."""
    lines = [*environment_lines(job), *doctor_lines(job)]
    lines += ["", "set -m  # the training is a process group of its own: SGE signals this script only, which passes signals on"]
    lines += [*waiting(job, command(job), soon="USR1", cancelled="USR2 TERM"), ""]
    if job.requeue:
        lines += _if_stopped(f"exit {RESCHEDULE}  # SGE puts the job back into the queue; training continues where it stopped")
    return [*lines, "exit $status"]


def plain_script(job: Job) -> str:
    """A script for bash, on one of the hosts or on one that reaches them over ssh."""
    hosts = [f"{host}:{job.tasks_per_node}" for host in job.hosts]
    body = [*environment_lines(job), *doctor_lines(job, hosts), ""]
    body += [*waiting(job, command(job, hosts), soon="USR1 TERM INT", cancelled=""), "", "exit $status"]
    return _script(job, [], body)


def _script(job: Job, head: Sequence[str], body: Sequence[str]) -> str:
    """The whole file. A scheduler reads its options from the comments before the first command."""
    return "\n".join(["#!/bin/bash", *head, *([""] if head else []), f"# {job.written_by}", "", *body]) + "\n"


def _if_stopped(then: str) -> list[str]:
    """Lines that run a command if the training stopped for its time limit, and was not cancelled."""
    return [f"if [ $status = {STOPPED} ] && [ $cancelled = no ]; then", f"    {then}", "fi"]
