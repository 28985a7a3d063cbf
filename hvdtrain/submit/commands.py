"""The command that starts the ranks, and the environment it needs."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.comm.launch import KEEPALIVE
from hvdtrain.submit.job import Job, folded, quoted

STOPPED = 75
"""Exit status of a training that was stopped with a checkpoint, to be continued."""

LAST_TASK = 60
"""Seconds after the end of the first task in which srun lets the other tasks end."""

IF_SET = ("LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables that mpirun exports if they are set; -x with an unset variable is an error."""


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


def doctor_lines(job: Job, hosts: Sequence[str] = ()) -> list[str]:
    """Lines that run the doctor on the ranks' hosts, if the job asks for it, and end the job where it finds a problem."""
    return ["", f"{command(job, hosts, before=['doctor', '--no-measure'])} || exit"] if job.doctor else []


def command(job: Job, hosts: Sequence[str] = (), before: Sequence[str] = ()) -> str:
    """The command that starts hvdtrain on all ranks, folded into lines.

    Args:
        hosts: host:slots for mpirun, if no scheduler names them.
        before: arguments before the config: another command of hvdtrain's, with its options.
    """
    python = quoted([job.python])
    program = quoted(["-m", "hvdtrain", *before, *job.arguments])
    if job.launcher == "python":
        return f"{python} {program}"
    if job.launcher == "mpirun":
        return folded([*mpirun(job, hosts), f"{python} {program}"])
    if job.launcher == "srun":
        # Without --wait, the other tasks wait forever for one that was killed. --kill-on-bad-exit is quicker, but replaces the
        # exit status of the ranks, by which the job is requeued.
        return folded([f"srun --mpi=pmix --cpu-bind=none --wait={LAST_TASK}", f"{python} {program}"])
    return folded([*torchrun(job), program])


def mpirun(job: Job, hosts: Sequence[str]) -> list[str]:
    """mpirun with its options."""
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
    """torchrun with its options: one agent per node."""
    agents = [f"srun --ntasks={job.nodes} --ntasks-per-node=1"] if job.nodes > 1 else []
    if job.nodes == 1:
        meeting = "--standalone"
    else:
        meeting = '--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$master:$port"'
    start = f"{quoted([job.python])} -m torch.distributed.run"
    return [*agents, start, f"--nnodes={job.nodes} --nproc-per-node={job.tasks_per_node}", meeting]


def waiting(job: Job, run: str, soon: str, cancelled: str) -> list[str]:
    """Lines that start the command in the background, pass signals on, and wait for its end; $status is its exit status then.

    Args:
        run: the command.
        soon: signals that the scheduler sends shortly before the time limit.
        cancelled: signals that a user cancels the job with.
    """
    # On SIGTERM mpirun kills the ranks within seconds, but it passes SIGUSR1 on. torchrun passes only SIGTERM on.
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
