"""The command that starts the ranks, and the environment it needs."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.doctor.environment import KEEPALIVE
from hvdtrain.submit.job import Job, folded, quoted

STOPPED = 75
"""What a training ends with that was stopped with a checkpoint, to be continued."""

IF_SET = ("LD_LIBRARY_PATH", "PYTHONPATH")
"""What mpirun hands on to other hosts where it is set; where it is not, -x would be an error."""


def environment_lines(job: Job) -> list[str]:
    """Lines that set up the job's environment on the host where the script runs."""
    lines = [f"cd {quoted([job.folder])} || exit", *job.setup]
    if job.threads is not None:
        lines.append(f"export OMP_NUM_THREADS={job.threads}  # per rank")
    if job.interface:
        lines.append(f"export NCCL_SOCKET_IFNAME={job.interface}  # beginnings of names; =name is exact, ^name excludes")
        if "," not in job.interface and not job.interface.startswith(("^", "=")):
            names = "HOROVOD_GLOO_IFACE" if job.launcher != "torchrun" else "GLOO_SOCKET_IFNAME"
            lines.append(f"export {names}={job.interface}  # the whole name")
    if job.launcher == "torchrun":
        lines.append("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted ranks find the addresses of dead ones")
    return lines


def command(job: Job, module: str = "hvdtrain", hosts: Sequence[str] = (), extra: Sequence[str] = ()) -> str:
    """The command, in lines.

    Args:
        module: what is run: the trainer, or the doctor.
        hosts: host:slots for mpirun where no scheduler names them.
        extra: arguments of the module before the config.
    """
    program = [quoted([job.python]), "-m", module, *map(quote, extra), *map(quote, job.arguments)]
    trainer = " ".join(program)
    if job.launcher == "python":
        return trainer
    if job.launcher == "mpirun":
        return folded([*mpirun(job, hosts), trainer])
    if job.launcher == "srun":
        # Without --wait, a task that is killed leaves the others waiting for it for ever. --kill-on-bad-exit would be quicker,
        # but it ends the step with a status of its own, and the one that the ranks stop with is what the job is requeued for.
        return folded([f"srun --mpi=pmix --cpu-bind=none --wait={LAST_TASK}", trainer])
    return folded([*torchrun(job), " ".join(program[1:])])


LAST_TASK = 60
"""Seconds that srun leaves the other tasks when the first one has ended."""


def quote(word: str) -> str:
    """One word for the shell."""
    return quoted([word])


def mpirun(job: Job, hosts: Sequence[str]) -> list[str]:
    """mpirun's part of the command."""
    words = [f"mpirun -np {job.tasks}"]
    if hosts:
        words.append(f"-H {','.join(hosts)}")
    words += ["-bind-to none -map-by slot"]
    exported = ["PATH", *job.exports]
    if job.threads is not None:
        exported.append("OMP_NUM_THREADS")
    if job.interface:
        exported.append("NCCL_SOCKET_IFNAME")
    words += [f"-x {name}" for name in dict.fromkeys(exported)]
    words += [f"${{{name}:+-x {name}}}" for name in IF_SET if name not in exported]
    if job.nodes > 1:
        if job.interface and not job.interface.startswith(("^", "=")):
            words.append(f"--mca oob_tcp_if_include {job.interface} --mca btl_tcp_if_include {job.interface}")
        words.append(KEEPALIVE)
    if job.gpus_per_node:
        words.append("-mca pml ob1 -mca btl ^openib")  # NCCL moves the gradients
    return words


def torchrun(job: Job) -> list[str]:
    """torchrun's part of the command: one agent a node."""
    agents = [f"srun --ntasks={job.nodes} --ntasks-per-node=1"] if job.nodes > 1 else []
    if job.nodes == 1:
        meeting = "--standalone"
    else:
        meeting = '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$master:$port"'
    start = f"{quoted([job.python])} -m torch.distributed.run"
    return [*agents, start, f"--nnodes={job.nodes} --nproc-per-node={job.tasks_per_node}", meeting]


def waiting(job: Job, run: str, soon: str, cancelled: str) -> list[str]:
    """Lines that start the command in the background, pass signals on, and wait for its end; its status is in $status then.

    Args:
        run: the command.
        soon: signals that come shortly before the time is up.
        cancelled: signals of people who want the job to end.
    """
    # mpirun makes a quick death out of SIGTERM, but passes SIGUSR1 on. torchrun passes only SIGTERM on.
    signal = "TERM" if job.launcher == "torchrun" else "USR1"
    what = f"On SIG{signal}" if job.launcher == "python" else f"{job.launcher} passes SIG{signal} on. On it"
    lines = [f"# {what} the trainer stops with a checkpoint, and ends with {STOPPED}.", f"{run} &", "pid=$!"]
    lines += ["cancelled=no"] if job.requeue and cancelled else []
    lines += ["stopped=no"] if job.launcher == "torchrun" else []
    stopped = "stopped=yes; " if job.launcher == "torchrun" else ""
    if soon:
        lines.append(f"trap '{stopped}kill -{signal} $pid' {soon}")
    if cancelled:
        noted = "cancelled=yes; " if job.requeue else ""
        lines.append(f"trap '{noted}kill -{signal} $pid' {cancelled}")
    lines.append("wait $pid; status=$?")
    lines.append("while kill -0 $pid 2>/dev/null; do wait $pid; status=$?; done  # a signal ends a wait, not the training")
    if job.launcher == "torchrun":
        lines.append(f"if [ $stopped = yes ] && [ $status != 0 ]; then status={STOPPED}; fi  # torchrun itself ends with 1")
    return lines
