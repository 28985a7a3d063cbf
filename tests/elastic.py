"""Trainings with faults planted in them, under launchers that start ranks again (docs/elastic.md)."""

import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from launching import ROOT, TOY, clean_environment, hvdtrain

from hvdtrain.plugins.trace.records import trained_on

PLANTED = """
from hvdtrain.checkpoint.folder import CheckpointFolder

_train_step = train_step
planted = config.list("planted", [])  # rank, first step and what happens then, one after the other
has_failed = False


def train_step(**arguments):
    global has_failed
    context = hvdtrain.get_run_ctx()
    before = len(list(Path(config.value("model")).parent.glob("fault-*")))
    if context.train_flag and before < len(planted) // 3 and not has_failed:
        rank, step, what = planted[3 * before : 3 * before + 3]
        if str(rank) in (str(hvdtrain.rank()), os.environ.get("HOROVOD_HOSTNAME")) and int(step) <= context.step:
            has_failed = True  # a job that is asked to stop may do so many steps later
            while config.bool("save_in_background", False) and CheckpointFolder(Path(config.value("model"))).newest() is None:
                time.sleep(0.05)  # steps may be faster than the process that saves
            Path(config.value("model")).with_name(f"fault-{before}").write_text(str(time.time()))
            if what == "raise":
                raise RuntimeError("planted by the test")
            if what == "exit":
                os._exit(3)
            if what == "hang":
                time.sleep(3600)
            while what == "loop":
                pass
            os.kill(os.getpid(), getattr(signal, what))
    _train_step(**arguments)
"""
"""Beside the toy config: each fault comes once, in this order, on a rank or on Horovod's host of this name."""

CHILDREN = """
_any_step = train_step


def train_step(**arguments):
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = sorted(Path(f"/proc/{pid}/comm").read_text().strip() for pid in children)
    with Path(config.value("model")).with_name(f"children-of-{hvdtrain.rank()}").open("a") as file:
        print(hvdtrain.get_run_ctx().step, *names, file=file)
    _any_step(**arguments)
"""
"""Beside these: what a rank's child processes are called, at each step."""

LATE_RANKS = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}
"""On a busy machine, one rank may start that much later than another."""

EPOCH = Counter(range(231))


def keys_of(corpus: Path, folder: Path, **more: object) -> dict[str, object]:
    keys = {
        "corpus": corpus,
        "model": folder / "model",
        "max_seqs": 4,
        "save_interval_steps": 4,
        "trace_sequences": folder / "trace",
    }
    return {**keys, "log_verbosity": 3, **more}


def write_config(folder: Path) -> Path:
    """The toy config with the faults."""
    path = folder / "config.py"
    path.write_text(TOY.read_text() + PLANTED)
    return path


def command(config: Path, keys: dict[str, object]) -> list[str]:
    return ["-m", "hvdtrain", str(config), *(text for key, value in keys.items() for text in (f"++{key}", str(value)))]


def assert_goes_on_alone(config: Path, keys: dict[str, object]) -> None:
    """What an error has ended continues by hand, on one rank; then every sequence was trained on once."""
    finished = hvdtrain(config, {**keys, "planted": [], "log_verbosity": 3})
    assert finished.status == 0, finished.err
    assert "training continues in epoch 1" in finished.out
    assert trained_on(Path(str(keys["trace_sequences"]))) == {1: EPOCH}


def horovodrun(hosts: Path, arguments: list[str]) -> list[str]:
    """The arguments of Python for a job of 3 ranks on this host, under the names in a file, as many as there are at any time."""
    script = hosts.with_suffix(".sh")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    job = ["-np", "3", "--min-np", "1", "--blacklist-cooldown-range", "300", "600", "--host-discovery-script", str(script)]
    return ["-m", "horovod.runner.launch", "--gloo", "--network-interface", "lo", *job, sys.executable, *arguments]


def torchrun_agents(
    arguments: list[str], patience: int, err: int | None = None
) -> tuple[int, Callable[[str], subprocess.Popen[bytes]]]:
    """The port at which the agents of torchrun meet, on this host as on two, and a function that starts one with a name.

    Args:
        patience: seconds that one waits for another one.
        err: where their errors go.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = (
        f"--nnodes 1:2 --nproc_per_node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id two "
        f"--rdzv-conf last_call_timeout={patience},keep_alive_interval=2,keep_alive_max_attempt=3"
    )

    def agent(name: str) -> subprocess.Popen[bytes]:
        environment = clean_environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "HOROVOD_HOSTNAME": name}
        run = [sys.executable, "-m", "torch.distributed.run", *options.split(), *arguments]
        return subprocess.Popen(run, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=err)

    return port, agent


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> float:
    """Wait while the process runs; return the seconds."""
    began = time.monotonic()
    deadline = began + 300
    while not is_so():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return time.monotonic() - began


def answers(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        return False
    return True


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
