"""Job scripts: for Slurm, for SGE and its successors, and for hosts without a scheduler."""

from __future__ import annotations

from hvdtrain.submit.commands import STOPPED, command, environment_lines, waiting
from hvdtrain.submit.job import Job, clock


def plain_script(job: Job) -> str:
    """A script for bash, on one of the hosts or on one that reaches them with ssh."""
    hosts = [f"{host}:{job.tasks_per_node}" for host in job.hosts]
    lines = ["#!/bin/bash", f"# {job.written_by}", "", *environment_lines(job)]
    if job.doctor:
        lines += ["", f"{command(job, 'hvdtrain.doctor', hosts, extra=['--no-measure'])} || exit"]
    return (
        "\n".join([*lines, "", *waiting(job, command(job, hosts=hosts), soon="USR1 TERM INT", cancelled=""), "", "exit $status"])
        + "\n"
    )


RESCHEDULE = 99
"""SGE puts a job that ends with this back into the queue."""


def sge_script(job: Job) -> str:
    """A script for qsub."""
    return "\n".join(["#!/bin/bash", *sge_head(job), "", f"# {job.written_by}", "", *sge_body(job)]) + "\n"


def sge_head(job: Job) -> list[str]:
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


def sge_body(job: Job) -> list[str]:
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


def slurm_script(job: Job) -> str:
    """A script for sbatch."""
    return "\n".join(["#!/bin/bash", *slurm_head(job), "", f"# {job.written_by}", "", *slurm_body(job)]) + "\n"


def slurm_head(job: Job) -> list[str]:
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


def slurm_body(job: Job) -> list[str]:
    """What runs on the job's first node."""
    lines = environment_lines(job)
    if job.launcher in ("srun", "torchrun"):
        lines.append('export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun no longer takes it over from sbatch')
    if job.launcher == "torchrun" and job.nodes > 1:
        lines += [
            'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | slurm_head -n 1)',
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
