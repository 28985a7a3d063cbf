"""Job scripts for Slurm."""

from __future__ import annotations

from hvdtrain.submit.commands import STOPPED, command, environment_lines, waiting
from hvdtrain.submit.job import Job, clock


def slurm_script(job: Job) -> str:
    """A script for sbatch."""
    return "\n".join(["#!/bin/bash", *head(job), "", f"# {job.written_by}", "", *body(job)]) + "\n"


def head(job: Job) -> list[str]:
    """What sbatch reads."""
    agents = job.launcher == "torchrun"  # one a node, which starts the ranks there
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
        lines.append(f"#SBATCH --signal=B:USR1@{job.stop_before}  # so many seconds before the end, to this script")
    if job.requeue:
        lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append  # the log goes on after a requeue"]
    return [*lines, *(f"#SBATCH {option}" for option in job.options)]


def body(job: Job) -> list[str]:
    """What runs on the job's first node."""
    lines = environment_lines(job)
    if job.launcher in ("srun", "torchrun"):
        lines.append('export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun no longer takes it over from sbatch')
    if job.launcher == "torchrun" and job.nodes > 1:
        lines += [
            'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 20000))  # other jobs on this node have others",
        ]
    if job.doctor:
        lines += ["", f"{command(job, 'hvdtrain.doctor', extra=['--no-measure'])} || exit"]
    lines += ["", *waiting(job, command(job), soon="USR1", cancelled="TERM"), ""]
    if job.requeue:
        lines.append(f"if [ $status = {STOPPED} ] && [ $cancelled = no ]; then")
        lines.append('    scontrol requeue "$SLURM_JOB_ID"  # it goes on where it stopped')
        lines.append("fi")
    return [*lines, "exit $status"]
