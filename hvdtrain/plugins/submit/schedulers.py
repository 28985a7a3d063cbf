"""The supported schedulers: Slurm, SGE and its successors, PBS Pro and OpenPBS, LSF, Kubernetes, or none."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.config.plugins import Registry
from hvdtrain.errors import Problem, problem
from hvdtrain.plugins.submit import job as jobs
from hvdtrain.plugins.submit.kubernetes import KUBERNETES
from hvdtrain.plugins.submit.texts import option_text

AGENT = 'agent=$(command -v blaunch) && export OMPI_MCA_plm_rsh_agent="$agent"'
"""Lets LSF's blaunch start mpirun's daemons. It is given with its folder, since the daemons also look for it."""

RESCHEDULE = 99
"""The exit status with which SGE puts a job back into the queue."""


def slurm_head(job: jobs.Job) -> list[str]:
    """The options for sbatch."""
    has_agents = job.launcher == "torchrun"  # one task per node, which starts the ranks there
    cores = job.cores if has_agents else job.cpus_per_task
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1 if has_agents else job.tasks_per_node,
        "cpus-per-task": cores,
        "gpus-per-node": job.gpus_per_node or None,
        "mem": jobs.memory_text(job.memory) if job.memory else None,
        "time": jobs.clock(job.seconds) if job.seconds else None,
        "partition": job.queue and option_text(job.queue),
        "account": job.account and option_text(job.account),
        "array": f"1-{len(job.runs)}" if job.runs else None,
        "output": option_text(f"{job.output}/{job.name}-{'%A_%a' if job.runs else '%j'}.out"),
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    if job.seconds:
        lines.append(f"#SBATCH --signal=B:USR1@{job.stop_before}  # to this script, {job.stop_before} s before the time limit")
    if job.requeue:
        lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append  # one log, also after a requeue"]
    if job.survives_nodes:
        lines.append("#SBATCH --no-kill  # the other nodes continue if one is lost")
    return [*lines, *(f"#SBATCH {option}" for option in job.options)]


def slurm_script(job: jobs.Job) -> str:
    """A script for sbatch. What follows its options runs on the job's first node."""
    lines = jobs.environment_lines(job)
    if job.launcher in ("srun", "torchrun"):
        lines.append('export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun does not take it from sbatch')
    if job.launcher == "torchrun" and job.nodes > 1:
        lines += [
            'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "port=$((20000 + SLURM_JOB_ID % 20000))  # jobs on the same node need different ports",
        ]
    lines += jobs.doctor_lines(job)
    run = jobs.command(job)
    if job.survives_nodes:
        lines += ["", *agent_lines(job)]
        run = f"srun --no-kill --ntasks={job.nodes} --ntasks-per-node=1 bash -c agent"
    lines += ["", *jobs.background_lines(job, run, before_limit="USR1", cancelled="TERM"), ""]
    if job.survives_nodes:
        lines += ['rm -f "$ended"']
    if job.requeue:
        lines += _if_stopped('scontrol requeue "$SLURM_JOB_ID"  # training continues where it stopped')
    return _script(job, slurm_head(job), lines)


def agent_lines(job: jobs.Job) -> list[str]:
    """A shell function that runs on every node of a job that continues without lost nodes.

    If the first node is lost, so are the script and the rendezvous of torchrun's agents. Because of --no-kill, Slurm would keep
    the job although nothing runs any more, so the other nodes end it.
    """
    end_job = "scontrol requeue" if job.requeue else "scancel"
    return [
        'export master port ended=".ended-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        "agent() {  # on every node",
        "    trap : TERM  # torchrun gets it, too",
        "    " + jobs.command(job).replace("\n", "\n    "),
        "    status=$?",
        '    [ "$SLURM_NODEID" != 0 ] || touch "$ended"',
        '    while [ $status != 0 ] && [ ! -e "$ended" ]; do  # the first node still runs, or is lost with the script',
        f'        case $(sinfo -h -n "$master" -o %t) in down*) {end_job} "$SLURM_JOB_ID" ;; esac',
        "        sleep 5",
        "    done",
        "    exit $status",
        "}",
        "export -f agent",
    ]


def sge_head(job: jobs.Job) -> list[str]:
    """The options for qsub. Resources are per slot, which is a core."""
    lines = ["#$ -S /bin/bash", f"#$ -N {job.name}", f"#$ -wd {option_text(job.folder)}"]
    lines += ["#$ -j y", f"#$ -o {option_text(f'{job.output}/')}"]
    if job.nodes * job.slots > 1:
        lines += [f"# A slot is a core: {job.slots} for each host.", f"#$ -pe {job.parallel_environment} {job.nodes * job.slots}"]
    if job.seconds:
        soft = max(60, job.seconds - job.stop_before)
        lines += ["# SIGUSR1 comes at s_rt:", f"#$ -l h_rt={jobs.clock(job.seconds)} -l s_rt={jobs.clock(soft)}"]
    if job.gpus_per_node:
        per_slot, remainder = divmod(job.gpus_per_node, job.slots)
        # A request per slot cannot be a fraction.
        shared = f"{job.slots} slots of a host share its GPUs: gpu has to be consumable per JOB (qconf -sc)"
        scope = shared if remainder else "For each slot"
        lines += [f"# {scope}:", f"#$ -l gpu={job.gpus_per_node if remainder else per_slot}"]
    if job.memory:
        text, share = jobs.memory_text(job.memory), jobs.memory_text(-(-job.memory // job.slots))
        lines += [f"# For each slot, {text} for each host; mapped HDF files and CUDA's address space count:"]
        lines += [f"#$ -l h_vmem={share}"]
    if job.queue:
        lines.append(f"#$ -q {option_text(job.queue)}")
    if job.account:
        lines.append(f"#$ -A {option_text(job.account)}")
    if job.seconds or job.requeue:
        lines += ["# SIGUSR2 comes before the job is killed:", "#$ -notify"]
    lines += [f"#$ -t 1-{len(job.runs)}"] if job.runs else []
    lines.append(f"#$ -r {'y' if job.requeue else 'n'}")
    return [*lines, *(f"#$ {option}" for option in job.options)]


def sge_script(job: jobs.Job) -> str:
    """A script for qsub. What follows its options runs on the job's first host; an Open MPI with support for SGE gets the hosts
    from SGE."""
    lines = [*jobs.environment_lines(job), *jobs.doctor_lines(job)]
    lines += ["", "set -m  # the training is a separate process group: SGE signals only this script, which passes signals on"]
    lines += [*jobs.background_lines(job, jobs.command(job), before_limit="USR1", cancelled="USR2 TERM"), ""]
    if job.requeue:
        lines += _if_stopped(f"exit {RESCHEDULE}  # SGE puts the job back into the queue; training continues where it stopped")
    return _script(job, sge_head(job), lines)


def pbs_script(job: jobs.Job) -> str:
    """A script for qsub of PBS Pro or OpenPBS. A chunk of `select` is a host; -k oed writes the log while the job runs."""
    chunk = [f"{job.nodes}:ncpus={job.cores}:mpiprocs={job.tasks_per_node}"]
    chunk += [f"ngpus={job.gpus_per_node}"] if job.gpus_per_node else []
    chunk += [f"mem={jobs.memory_text(job.memory, 'gb', 'mb')}"] if job.memory else []
    head = ["#PBS -S /bin/bash", f"#PBS -N {job.name}", f"#PBS -l select={':'.join(chunk)}"]
    head += ["#PBS -l place=scatter"] if job.nodes > 1 else []
    head += [f"#PBS -l walltime={jobs.clock(job.seconds)}"] if job.seconds else []
    head += [f"#PBS -q {option_text(job.queue)}"] if job.queue else []
    head += [f"#PBS -A {option_text(job.account)}"] if job.account else []
    head += [f"#PBS -o {option_text(f'{job.output}/')}", "#PBS -j oe", "#PBS -k oed"]
    head += [f"#PBS -J 1-{len(job.runs)}"] if job.runs else []
    # PBS refuses an array that must not be restarted after the loss of a host.
    head += [f"#PBS -r {'y' if job.requeue or job.runs else 'n'}", *(f"#PBS {option}" for option in job.options)]
    # PBS sends no signal before the limit, and only 10 s remain after it.
    lines = _timed_lines(job, ["# For an Open MPI without PBS's tm, which starts the ranks over ssh:"], "$PBS_NODEFILE", "TERM")
    if job.requeue:
        lines += _if_stopped(
            'qsub "$0"  # a job may not requeue itself, so it submits itself; training continues where it stopped'
        )
    return _script(job, head, lines)


def lsf_script(job: jobs.Job) -> str:
    """A script for bsub. A slot (-n; ptile: per host) is a core. A job that ends with the status of -Q is requeued."""
    head = [f'#BSUB -J "{job.name}[1-{len(job.runs)}]"' if job.runs else f"#BSUB -J {job.name}"]
    head += [f"#BSUB -n {job.nodes * job.slots}"]
    head += [f'#BSUB -R "span[ptile={job.slots}]"']
    head += [f'#BSUB -R "rusage[mem={jobs.memory_text(job.memory, "GB", "MB")}/host]"'] if job.memory else []
    head += [f'#BSUB -gpu "num={job.gpus_per_node}/host:j_exclusive=yes"'] if job.gpus_per_node else []
    head += [f"#BSUB -W {jobs.clock(job.seconds + 59)[:-3]}"] if job.seconds else []
    head += [f"#BSUB -q {option_text(job.queue)}"] if job.queue else []
    head += [f"#BSUB -P {option_text(job.account)}"] if job.account else []
    number = "%J-%I" if job.runs else "%J"
    head += [f"#BSUB -o {option_text(f'{job.output}/{job.name}-{number}.out')}"]
    head += ["#BSUB -r", f'#BSUB -Q "{jobs.STOPPED}"'] if job.requeue else []
    head += [f"#BSUB {option}" for option in job.options]
    lines = _timed_lines(job, ["# For an Open MPI without LSF's support:", AGENT], "$LSB_DJOB_HOSTFILE", "TERM INT")
    if job.requeue:
        lines += [f"if [ $status = {jobs.STOPPED} ] && [ $cancelled = yes ]; then status=143; fi  # or LSF would requeue it"]
    return _script(job, head, lines)


def _timed_lines(job: jobs.Job, about: Sequence[str], file: str, cancelled: str) -> list[str]:
    """Lines that run the training and send it the signal before the time limit, as the scheduler does not.

    Args:
        about: lines before the one that sets $hosts to host:ranks,... for mpirun, if there are several hosts.
        file: the scheduler's file with a line per slot.
    """
    lines = jobs.environment_lines(job)
    hosts = ['"$hosts"'] if job.nodes > 1 and job.launcher == "mpirun" else []
    if hosts:
        lines += [*about, f"hosts=$(sort -u \"{file}\" | sed 's/$/:{job.tasks_per_node}/' | paste -sd, -)"]
    run = jobs.command(job, hosts)
    lines += [*jobs.doctor_lines(job, hosts), ""]
    return [*lines, *jobs.background_lines(job, run, before_limit="USR1", cancelled=cancelled, timer=True), ""]


def _array_problems(job: jobs.Job) -> list[Problem]:
    if job.runs and job.requeue:
        return problem(
            "conflict", "--sweep: expected --no-requeue with pbs, where a job of an array cannot resubmit itself, got none"
        )
    return []


def plain_script(job: jobs.Job) -> str:
    """A script for bash, to run on one of the hosts or on a host that can reach them over ssh."""
    hosts = [f"{host}:{job.tasks_per_node}" for host in job.hosts]
    body = [*jobs.environment_lines(job), *jobs.doctor_lines(job, hosts), ""]
    body += [*jobs.background_lines(job, jobs.command(job, hosts), before_limit="USR1 TERM INT", cancelled=""), ""]
    return _script(job, [], body)


def _host_problems(job: jobs.Job) -> list[Problem]:
    if job.nodes == 1 or len(job.hosts) == job.nodes:
        return []
    return problem("missing", f"--hosts: expected the names of {job.nodes} hosts, got {','.join(job.hosts) or 'none'}")


def _script(job: jobs.Job, head: Sequence[str], body: Sequence[str]) -> str:
    """The complete script. A scheduler reads its options from the comments before the first command."""
    return "\n".join(["#!/bin/bash", *head, *([""] if head else []), f"# {job.written_by}", "", *body, "exit $status"]) + "\n"


def _if_stopped(then: str) -> list[str]:
    return [f"if [ $status = {jobs.STOPPED} ] && [ $cancelled = no ]; then", f"    {then}", "fi"]


SCHEDULERS: Registry[jobs.Scheduler] = Registry(
    "schedulers",
    {
        scheduler.name: scheduler
        for scheduler in (
            jobs.Scheduler(
                name="slurm", write=slurm_script, submit=("sbatch",), array_index=("SLURM_ARRAY_TASK_ID", 1), has_srun=True
            ),
            jobs.Scheduler(
                name="sge",
                write=sge_script,
                submit=("qsub",),
                array_index=("SGE_TASK_ID", 1),
                in_comments=("--name", "--queue", "--account", "--output", "--folder"),
                cores=1,  # a rank is one slot, unless more are requested
                slots_are_cores=True,
            ),
            jobs.Scheduler(
                name="pbs", write=pbs_script, submit=("qsub",), problems=_array_problems, array_index=("PBS_ARRAY_INDEX", 1)
            ),
            jobs.Scheduler(name="lsf", write=lsf_script, submit=("bsub",), array_index=("LSB_JOBINDEX", 1), slots_are_cores=True),
            KUBERNETES,
            jobs.Scheduler(
                name="mpi",
                write=plain_script,
                submit=("bash",),
                problems=_host_problems,
                unsupported=("memory", "time", "queue", "account", "option"),
                in_comments=(),
                cores=None,
                requeues=False,
            ),
        )
    },
)
"""By the value of --scheduler."""
