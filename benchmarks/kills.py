#!/usr/bin/env python3
"""Kill trainings at random moments and look at what is left.

kills.py saves --kills 200     a process that saves and saves; after every kill, is the newest checkpoint whole?
kills.py starts --kills 50     a training that does little but save; after every kill, does it go on?
kills.py soak --kills 20       the demo's task on changing numbers of ranks; was every sequence trained on once an epoch?
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hvdtrain.checkpoint.folder import UNFINISHED, CheckpointFolder  # noqa: E402  # the line above finds the checkout
from hvdtrain.training.trace import num_runs, trained_on  # noqa: E402

SAVING_CONFIG = """
import torch
from torch import nn
import hvdtrain

train = {"class": "Task12AXDataset", "num_seqs": 40}
max_seqs, num_epochs, num_threads, learning_rate, log_verbosity = 10, 10**6, 1, 0.01, 3
save_interval_steps = 1  # and after every epoch of 4 steps

def get_model(**_):
    return nn.ModuleList([nn.Linear(9, 2), nn.Linear(500, 500)])  # the second one only makes files larger: 1 MB, optimizer 2 MB

def train_step(*, model, extern_data, **_):
    data, classes = extern_data["data"], extern_data["classes"]
    scores = model[0](data.raw_tensor) + 0 * model[1].weight.sum()
    loss = nn.functional.cross_entropy(scores[data.mask], classes.raw_tensor[classes.mask].long(), reduction="none")
    hvdtrain.get_run_ctx().mark_as_loss(loss, "ce")
"""


def saves(kills: int, seed: int) -> None:
    """Kill a process in the midst of saving; what is left has to be whole: one step's model, optimizer and progress.

    The model's and the optimizer's numbers are those of the step, so files of different steps would be seen.
    """
    import torch

    from hvdtrain.checkpoint.progress import EpochProgress, Progress
    from hvdtrain.checkpoint.saver import Saver
    from hvdtrain.comm.base import SingleCommunicator
    from hvdtrain.learner.reduce import GradReduce
    from hvdtrain.learner.torch.state import TorchState
    from hvdtrain.runtime.timer import Timer

    torch.set_num_threads(1)  # others would not be there in a forked process
    comm = SingleCommunicator()
    reducer = GradReduce(comm, Timer(), average=False)
    model = torch.nn.Linear(400, 400)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # so that there is a state
    state = TorchState(model, optimizer, torch.device("cpu"), None, None, frozenset())

    def set_all(step: int) -> None:
        with torch.no_grad():
            for tensor in (model.weight, model.bias, *(optimizer.state[model.weight][name] for name in ("exp_avg", "step"))):
                tensor.fill_(float(step))

    def stored() -> set[float]:
        tensors = model.weight, model.bias, *(optimizer.state[model.weight][name] for name in ("exp_avg", "step"))
        return {float(value) for tensor in tensors for value in (tensor.detach().min(), tensor.detach().max())}

    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = CheckpointFolder(folder / "model")
        saver = Saver(comm, state, reducer, checkpoints, "shard")

        def save_for_ever(step: int) -> None:
            while True:  # five steps an epoch
                step += 1
                set_all(step)
                current = EpochProgress(step // 5 + 1, step // 5 * 5) if step % 5 else None
                saver.save(Progress(step=step, epoch=step // 5, current=current))

        step = unfinished = moved = 0
        for number in range(kills):
            child = os.fork()
            if child == 0:
                save_for_ever(step)
            time.sleep(generator.uniform(0.02, 0.3) if step else 2.0)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            unfinished += any(path.name.endswith(UNFINISHED) for path in folder.iterdir())
            newest = checkpoints.newest()
            if newest is None:
                raise SystemExit(f"kill {number}: expected a checkpoint, got {sorted(path.name for path in folder.iterdir())}")
            found = saver.load(newest).step
            if stored() != {float(found)} or found < step or found != (newest.step or 5 * newest.epoch):
                raise SystemExit(f"kill {number}: expected all of one step, not before {step}, got {stored()}")
            moved += found > step
            step = found
    print(f"{kills} kills, {unfinished} of them while files were being written; after each the newest checkpoint was whole,")
    print(f"and never older than after the kill before ({moved} times newer); {step} checkpoints were written in all")


def starts(kills: int, seed: int) -> None:
    """Kill a training that saves all the time; the next one has to go on from what is left."""
    import hvdtrain.learner.torch.build  # noqa: F401  here, so that the children find it imported, and --help answers at once
    from hvdtrain.run import train
    from hvdtrain.settings import read_settings

    generator = random.Random(seed)
    unfinished = stepped_back = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.py").write_text(SAVING_CONFIG)
        checkpoints = CheckpointFolder(folder / "model")
        before = None
        for number in range(kills):
            child = os.fork()  # a process that has imported everything: a new one would take seconds
            if child == 0:
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                    train(read_settings([folder / "config.py"], {"model": str(folder / "model")}))
                finally:
                    traceback.print_exc()
                    os._exit(1)
            deadline = time.monotonic() + 120
            while checkpoints.newest() == before:  # until it went on and saved
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended or time.monotonic() > deadline:
                    raise SystemExit(f"kill {number}: expected training to go on, it ended with {status}: see {folder}")
                time.sleep(0.001)
            time.sleep(generator.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            left = checkpoints.newest()
            unfinished += any(path.name.endswith(UNFINISHED) for path in folder.iterdir())
            stepped_back += left is None or (before is not None and left.age < before.age)
            lines = epochs_told(folder / "scores.jsonl")
            if left is not None and lines[: left.epoch - 1] != list(range(1, left.epoch)):
                raise SystemExit(f"kill {number}: expected a line in scores.jsonl for every epoch, got {lines}")
            before = left
            if (number + 1) % 20 == 0:
                print(f"{number + 1} kills, {unfinished} while files were being written", flush=True)
        last = checkpoints.newest()
        print(f"{kills} kills, {unfinished} of them while files were being written: training went on {kills} times,")
        print(f"{stepped_back} times from an older checkpoint than before the kill; it came to epoch {last.epoch if last else 0}")


def epochs_told(path: Path) -> list[int]:
    """The epochs that have a whole line in scores.jsonl."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["epoch"] for line in lines if line.endswith("}")]


def soak(kills: int, seed: int, data: Path, ranks: list[int], epochs: int) -> None:
    """Kill the demo's training on changing numbers of ranks, then let it finish; and once more undisturbed."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killed, sizes = 0, []
        while killed < kills:
            size = ranks[killed % len(ranks)]
            process = _start(folder / "killed", data, size, epochs)
            checkpoints = CheckpointFolder(folder / "killed" / "model")
            first = checkpoints.newest()
            while checkpoints.newest() == first and process.poll() is None:
                time.sleep(0.01)
            time.sleep(generator.uniform(0, 2))
            if process.poll() is not None:
                raise SystemExit(f"expected more than {killed} kills before the training's end (more --epochs), or it failed")
            how = generator.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGUSR1])
            _signal(process, how, generator)
            process.wait()
            killed += 1
            sizes.append(size)
            last = checkpoints.newest()
            print(f"kill {killed}: {how.name} on {size} ranks, newest {last.model_file.name if last else None}", flush=True)
        if _start(folder / "killed", data, ranks[0], epochs).wait() or _start(folder / "whole", data, ranks[0], epochs).wait():
            raise SystemExit("expected the training to finish")
        counted = trained_on(folder / "killed" / "trace")
        whole = trained_on(folder / "whole" / "trace")
        runs = num_runs(folder / "killed" / "trace")
        odd = {}
        for epoch, wanted in whole.items():
            if counted.get(epoch) != wanted:
                odd[epoch] = _difference(counted.get(epoch, Counter()), wanted)
        print(f"{killed} kills, {runs} starts on {' '.join(map(str, sizes))} ranks")
        print(f"{len(whole)} epochs of {len(whole[1])} sequences each")
        if odd:
            raise SystemExit(f"expected the sequences of an undisturbed run, got (missing, surplus) by epoch: {odd}")
        print("every epoch was trained on exactly the sequences of an undisturbed run, each once")


def _difference(some: Counter[int], others: Counter[int]) -> tuple[int, int]:
    return (others - some).total(), (some - others).total()


def _start(folder: Path, data: Path, size: int, epochs: int) -> subprocess.Popen[bytes]:
    keys = {
        "train.files": data / "train.hdf",
        "train.partition_epoch": 60,
        "dev": None,
        "eval": None,
        "max_seqs": 32,
        "num_epochs": epochs,
        "num_threads": 1,
        "save_interval_steps": 7,
        "trace_sequences": folder / "trace",
        "model": folder / "model",
        "log": folder / "log",
        "use_horovod": size > 1,
    }
    command = [sys.executable, "-m", "hvdtrain", str(ROOT / "configs" / "g2p.py")]
    for name, value in keys.items():
        command += [f"++{name}", str(value)]
    if size > 1:
        command = ["mpirun", "-np", str(size), "--bind-to", "none", "--oversubscribe", *command]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _signal(process: subprocess.Popen[bytes], how: signal.Signals, generator: random.Random) -> None:
    """SIGKILL to one of the ranks (mpirun then ends the others), or another signal to the launcher."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if how == signal.SIGKILL and children:
        os.kill(int(generator.choice(children)), how)
    else:
        process.send_signal(how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["saves", "starts", "soak"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "g2p", help="soak: the folder of train.hdf")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1, 3], help="soak: numbers of ranks, in turn")
    parser.add_argument("--epochs", type=int, default=20, help="soak: epochs of a 60th of the data")
    arguments = parser.parse_args()
    if arguments.what == "saves":
        saves(arguments.kills, arguments.seed)
    elif arguments.what == "starts":
        starts(arguments.kills, arguments.seed)
    else:
        soak(arguments.kills, arguments.seed, arguments.data, arguments.ranks, arguments.epochs)


if __name__ == "__main__":
    main()
