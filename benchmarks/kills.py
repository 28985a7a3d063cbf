#!/usr/bin/env python3
"""Kill trainings at random moments and verify that nothing is lost.

kills.py saves --kills 200     a process that saves all the time; after every kill, the newest checkpoint has to be complete
kills.py starts --kills 50     a training that mostly saves (--background: in the background; --local: to another disk first);
                               after every kill, it has to resume
kills.py soak --kills 20       the demo on changing numbers of ranks; every epoch has to train on every sequence exactly once
kills.py elastic --kills 50    the demo on 4 ranks that restart by themselves (max_restarts); the weights have to be the same, too
kills.py elastic --kills 20 --least 2
                               the same, and ranks that are killed twice before they save continue with fewer (min_ngpu)
kills.py goodput --kills 10 --every 60
                               the demo on 4 ranks, of which one is killed every minute; prints which share of the time was useful
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hvdtrain.checkpoint.files import Checkpoint  # noqa: E402
from hvdtrain.checkpoint.folder import CheckpointFolder  # noqa: E402
from hvdtrain.disk.atomic import UNFINISHED  # noqa: E402
from hvdtrain.errors import TO_BE_CONTINUED  # noqa: E402
from hvdtrain.plugins.goodput.spent import Spent  # noqa: E402
from hvdtrain.plugins.local_ranks.fork_server import NAME as FORK_SERVER  # noqa: E402
from hvdtrain.plugins.trace.records import has_begun, num_runs, trained_on  # noqa: E402

NOTHING: Mapping[str, object] = {}

SAVING_CONFIG = """
import torch
from torch import nn
import hvdtrain

train = {"class": "Task12AXDataset", "num_seqs": 40}
max_seqs, num_epochs, num_threads, learning_rate, log_verbosity = 10, 10**6, 1, 0.01, 3
save_interval_steps = 1  # and after every epoch, which has 4 steps

def get_model(**_):
    return nn.ModuleList([nn.Linear(9, 2), nn.Linear(500, 500)])  # the second layer only makes files larger: 1 MB, optimizer 2 MB

def train_step(*, model, extern_data, **_):
    data, classes = extern_data["data"], extern_data["classes"]
    scores = model[0](data.raw_tensor) + 0 * model[1].weight.sum()
    loss = nn.functional.cross_entropy(scores[data.mask], classes.raw_tensor[classes.mask].long(), reduction="none")
    hvdtrain.get_run_ctx().mark_as_loss(loss, "ce")
"""


def saves(kills: int, seed: int) -> None:
    """Kill a process while it saves; the model, optimizer and progress that are left have to be from the same step.

    All numbers in the model and the optimizer equal the step, so that a mix of different steps is detected.
    """
    import torch

    from hvdtrain.checkpoint.loader import Loader
    from hvdtrain.checkpoint.progress import EpochProgress, Progress
    from hvdtrain.checkpoint.saver import Saver
    from hvdtrain.comm.single import SingleCommunicator
    from hvdtrain.learner.reducers import ReduceKeys
    from hvdtrain.learner.torch.state import TorchState, Unsaved
    from hvdtrain.runtime.timer import Timer

    torch.set_num_threads(1)  # further threads would not exist in a forked process
    comm = SingleCommunicator()
    sync = ReduceKeys().reducer(comm, Timer()).sync
    model = torch.nn.Linear(400, 400)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the optimizer's state
    state = TorchState(model, optimizer, torch.device("cpu"), None, None, Unsaved())

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
        loader = Loader(comm, state, sync, checkpoints)
        saver = Saver(loader, "shard")

        def save_forever(step: int) -> None:
            while True:  # five steps an epoch
                step += 1
                set_all(step)
                current = EpochProgress(step // 5 + 1, step // 5 * 5, position=step % 5) if step % 5 else None
                saver.save(Progress(step=step, epoch=step // 5, current=current), saver.prepare())

        step = unfinished = moved = 0
        for number in range(kills):
            child = os.fork()
            if child == 0:
                save_forever(step)
            time.sleep(generator.uniform(0.02, 0.3) if step else 2.0)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            unfinished += any(path.name.endswith(UNFINISHED) for path in folder.iterdir())
            newest = checkpoints.newest()
            if newest is None:
                raise SystemExit(f"kill {number}: expected a checkpoint, got {sorted(path.name for path in folder.iterdir())}")
            found = loader.load(newest).step
            if stored() != {float(found)} or found < step or found != (newest.step or 5 * newest.epoch):
                raise SystemExit(f"kill {number}: expected all numbers from one step, {step} or later, got {stored()}")
            moved += found > step
            step = found
    print(f"{kills} kills, {unfinished} of them while files were being written; after each, the newest checkpoint was complete")
    print(f"and not older than after the previous kill ({moved} times newer); {step} checkpoints were written in total")


def starts(kills: int, seed: int, more: Mapping[str, object]) -> None:
    """Kill a training that saves all the time; the next start has to resume it from the newest checkpoint.

    Args:
        more: further keys.
    """
    import hvdtrain.learner.torch.learner  # noqa: F401  imported once for all child processes; not at the top, so that --help is fast
    from hvdtrain.run import train
    from hvdtrain.settings import read_settings

    generator = random.Random(seed)
    unfinished = stepped_back = behind = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.py").write_text(SAVING_CONFIG)
        checkpoints = CheckpointFolder(folder / "model")
        keys = {"model": str(folder / "model"), **{name: str(value) for name, value in more.items()}}
        if "checkpoint_local" in more:
            keys["checkpoint_local"] = str(folder / "disk")
        before = None
        for number in range(kills):
            child = os.fork()  # everything is imported already: a new process would take seconds
            if child == 0:
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                    train(read_settings([folder / "config.py"], keys))
                finally:
                    traceback.print_exc()
                    os._exit(1)
            deadline = time.monotonic() + 120
            waiting = _on_disk(checkpoints)
            while checkpoints.newest() == before:  # until it has resumed and saved
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended or time.monotonic() > deadline:
                    raise SystemExit(f"kill {number}: expected training to resume, got status {status} in {folder}")
                time.sleep(0.001)
            time.sleep(generator.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            left = checkpoints.newest()
            behind += waiting is not None
            stepped_back += waiting is not None and (left is None or left.age < waiting.age)
            unfinished += any(path.name.endswith(UNFINISHED) for path in folder.iterdir())
            stepped_back += left is None or (before is not None and left.age < before.age)
            lines = epochs_in(folder / "scores.jsonl")
            if left is not None and lines[: left.epoch - 1] != list(range(1, left.epoch)):
                raise SystemExit(f"kill {number}: expected a line in scores.jsonl for every epoch, got {lines}")
            before = left
            if (number + 1) % 20 == 0:
                print(f"{number + 1} kills, {unfinished} while files were being written", flush=True)
        last = checkpoints.newest()
        print(f"{kills} kills, {unfinished} of them while files were being written: training resumed {kills} times,")
        print(f"{stepped_back} times from an older checkpoint than before the kill; it reached epoch {last.epoch if last else 0}")
        if "checkpoint_local" in more:
            print(f"{behind} times from one that was on the local disk only")


def _on_disk(checkpoints: CheckpointFolder) -> Checkpoint | None:
    """The newest checkpoint, if it is on the local disk only."""
    newest, note = checkpoints.newest(), checkpoints.note
    found = checkpoints.models([json.loads(note.read_text())["model"]] if note.exists() else [])
    return next((one for one in found if newest is None or one.age > newest.age), None)


def epochs_in(path: Path) -> list[int]:
    """The epochs with a complete line in scores.jsonl."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["epoch"] for line in lines if line.endswith("}")]


def soak(kills: int, seed: int, data: Path, ranks: list[int], epochs: int) -> None:
    """Kill the demo's training on changing numbers of ranks, let it finish, and compare with an undisturbed run."""
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
                raise SystemExit(
                    f"expected {kills} kills before training ends, got {killed}; it failed or has finished (raise --epochs)"
                )
            how = generator.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGUSR1])
            _signal(process, how, generator)
            process.wait()
            killed += 1
            sizes.append(size)
            last = checkpoints.newest()
            print(f"kill {killed}: {how.name} on {size} ranks, newest {last.model_file.name if last else None}", flush=True)
        if _start(folder / "killed", data, ranks[0], epochs).wait() or _start(folder / "whole", data, ranks[0], epochs).wait():
            raise SystemExit("expected the training to finish")
        print(f"{killed} kills, {num_runs(folder / 'killed' / 'trace')} starts on {' '.join(map(str, sizes))} ranks")
        _compare(folder / "killed", folder / "whole")


def _difference(some: Counter[int], others: Counter[int]) -> tuple[int, int]:
    return (others - some).total(), (some - others).total()


def elastic(kills: int, seed: int, data: Path, size: int, least: int, epochs: int) -> None:
    """Kill random ranks of one job, which starts at least `least` of them again; compare with an undisturbed run."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        killed, whole = Path(name, "killed"), Path(name, "whole")
        killed.mkdir()
        keys = {"use_horovod": False, "ngpu": size}
        with (killed / "errors").open("w") as errors:
            process = _start(killed, data, size, epochs, {**keys, "max_restarts": kills, "min_ngpu": least}, errors)
        sizes = [size]
        seconds: list[float] = []
        in_start, first_run, at, before = 0, 0, 0.0, set[int]()
        for number in range(kills):
            if number and generator.random() < 0.25:
                in_start += 1
            else:
                _wait_until(lambda: has_begun(killed / "trace", first_run, sizes[-1]), process, killed)  # noqa: B023  # called here
                if number:
                    seconds.append(time.time() - at)
            _wait_until(lambda: len(_children(process) - before) == sizes[-1], process, killed)  # noqa: B023  # called here
            time.sleep(generator.uniform(0, 3))
            ranks = sorted(_children(process) - before)
            if len(ranks) != sizes[-1]:
                raise SystemExit(
                    f"expected {sizes[-1]} ranks before kill {number + 1}, got {ranks}: {(killed / 'errors').read_text()}"
                )
            before.update(ranks)
            os.kill(generator.choice(ranks), signal.SIGKILL)
            at, first_run = time.time(), num_runs(killed / "trace")
            _wait_until(lambda: len(_restarts(killed)) == number + 1, process, killed)  # noqa: B023  # called here
            sizes = [size, *_restarts(killed)]
            print(f"kill {number + 1}: after {first_run} runs; {sizes[-1]} ranks continue", flush=True)
        if process.wait() or _start(whole, data, size, epochs, keys).wait():
            raise SystemExit(f"expected the training to finish, got {(killed / 'errors').read_text()}")
        fewer = f", fewer and fewer down to {sizes[-1]}" if sizes[-1] < size else ""
        print(f"{kills} kills of one of {size} ranks{fewer}; {in_start} at any moment of the start-up or soon after")
        print(f"{len(_restarts(killed))} restarts")
        if seconds:
            middle = sorted(seconds)[len(seconds) // 2]
            print(f"from a kill to the next step of all ranks: median {middle:.1f} s, {min(seconds):.1f} to {max(seconds):.1f} s")
        _compare(killed, whole)
        if sizes[-1] == size:
            _compare_weights(killed, whole, epochs)


def goodput(kills: int, every: float, seed: int, data: Path, size: int, more: Mapping[str, object]) -> None:
    """Kill a random rank of one job at equal intervals, stop it, and compare its goodput with two measurements from outside."""
    generator = random.Random(seed)
    keys = {
        "use_horovod": False,
        "ngpu": size,
        "train.partition_epoch": 4,
        "save_interval_steps": None,
        "save_interval_minutes": "auto",
        "log_verbosity": 4,
        **more,
    }
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name, "whole"), Path(name, "killed")
        seconds: dict[Path, float] = {}
        for folder in (whole, killed):
            folder.mkdir()
            restarts = kills if folder is killed else 0
            with (folder / "errors").open("w") as errors:
                began = time.time()
                process = _start(folder, data, size, 10**4, {**keys, "max_restarts": max(1, restarts)}, errors)
            for number in range(restarts):
                _wait_until(lambda: time.time() >= began + every * (number + 1), process, folder)  # noqa: B023  # called here
                os.kill(generator.choice(sorted(_children(process))), signal.SIGKILL)
                _wait_until(lambda: len(_restarts(folder)) == number + 1, process, folder)  # noqa: B023  # called here
            _wait_until(lambda: time.time() >= began + every * (restarts + 1), process, folder)  # noqa: B023  # called here
            process.send_signal(signal.SIGTERM)
            if process.wait() != TO_BE_CONTINUED:
                raise SystemExit(f"expected the training to stop, got {(folder / 'errors').read_text()}")
            seconds[folder] = time.time() - began
        spent, steps = {}, {}
        for folder in (whole, killed):
            spent[folder], steps[folder] = _progress(folder)
        print(f"{kills} kills of one of {size} ranks, one every {every:g} s; {steps[killed]} steps stayed")
        print(spent[killed].line())
        print(
            f"from outside: {seconds[killed]:.1f} s from the first start to the end, {spent[killed].seconds:.1f} s in the account"
        )
        rate = steps[whole] / spent[whole].useful
        outside = steps[killed] / rate / seconds[killed]
        print(f"without kills, a step takes {1000 / rate:.1f} ms: by the steps that stayed, the goodput is {outside:.1%}")
        log = next(killed.glob("log.*-0-*")).read_text().splitlines()
        print(*[line for line in log if "save_interval_minutes: " in line][-1:])


def _progress(folder: Path) -> tuple[Spent, int]:
    """Where the seconds of a stopped training went, and the number of its steps, by its last checkpoint."""
    import torch

    checkpoint = CheckpointFolder(folder / "model").newest()
    state = {} if checkpoint is None else torch.load(checkpoint.model_file, weights_only=True)
    spent = Spent.from_state(state.get("spent"))
    if spent is None:
        raise SystemExit(f"expected a checkpoint, got {sorted(path.name for path in folder.iterdir())}")
    return spent, state["step"]


def _restarts(folder: Path) -> list[int]:
    """How many ranks went on after each restart, as the launcher says."""
    return list(map(int, re.findall(r"^restart .*; (\d+) ranks? continue", (folder / "errors").read_text(), re.MULTILINE)))


def _children(process: subprocess.Popen[bytes]) -> set[int]:
    """The process ids of the ranks that a launcher has started."""
    found = set()
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() != FORK_SERVER:
                found.add(int(pid))
    return found


def _wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(
                f"expected training to continue until the last kill, got status {process.returncode} (raise --epochs, if it has "
                f"finished): {(folder / 'errors').read_text()}"
            )
        time.sleep(0.02)


def _compare(disturbed: Path, whole: Path) -> None:
    """Raise SystemExit unless two trainings were on the same sequences in every epoch."""
    counted, wanted = trained_on(disturbed / "trace"), trained_on(whole / "trace")
    odd = {
        epoch: _difference(counted.get(epoch, Counter()), wanted[epoch])
        for epoch in wanted
        if counted.get(epoch) != wanted[epoch]
    }
    print(f"{len(wanted)} epochs of {len(wanted[1])} sequences each")
    if odd:
        raise SystemExit(f"expected the sequences of an undisturbed run, got (missing, additional) by epoch: {odd}")
    print("every epoch was trained on exactly the sequences of an undisturbed run, each once")


def _compare_weights(disturbed: Path, whole: Path, epochs: int) -> None:
    """Raise SystemExit unless two trainings ended with the same model and the same scores in every epoch."""
    import torch

    files = [CheckpointFolder(folder / "model").checkpoint_at(epochs).model_file for folder in (disturbed, whole)]
    one, other = (torch.load(file, weights_only=True)["model"] for file in files)
    different = [name for name in other if not torch.equal(one[name], other[name])]
    lines = [(folder / "scores.jsonl").read_text().splitlines() for folder in (disturbed, whole)]
    scores = [[json.loads(line)["scores"] for line in each] for each in lines]
    if different or scores[0] != scores[1]:
        raise SystemExit(f"expected the weights and scores of an undisturbed run, got others in {different}, {scores}")
    print(f"the weights after {epochs} epochs and all scores are those of the undisturbed run, to the last bit")


def _start(
    folder: Path,
    data: Path,
    size: int,
    epochs: int,
    more: Mapping[str, object] = NOTHING,
    errors: IO[str] | int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start the demo's training, under mpirun unless `more` keys say `ngpu`."""
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
        **more,
    }
    command = [sys.executable, "-m", "hvdtrain", str(ROOT / "configs" / "g2p.py")]
    for name, value in keys.items():
        command += [f"++{name}", str(value)]
    if size > 1 and "ngpu" not in more:
        command = ["mpirun", "-np", str(size), "--bind-to", "none", "--oversubscribe", *command]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def _signal(process: subprocess.Popen[bytes], how: signal.Signals, generator: random.Random) -> None:
    """Send SIGKILL to one of the ranks (mpirun then ends the others), or another signal to the launcher."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if how == signal.SIGKILL and children:
        os.kill(int(generator.choice(children)), how)
    else:
        process.send_signal(how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["saves", "starts", "soak", "elastic", "goodput"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "g2p", help="soak, elastic, goodput: folder of train.hdf")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1, 3], help="soak: numbers of ranks to cycle through")
    parser.add_argument("--size", type=int, default=4, help="elastic, goodput: the number of ranks")
    parser.add_argument("--every", type=float, default=60.0, help="goodput: seconds between two kills")
    parser.add_argument("--background", action="store_true", help="starts: checkpoints are written in the background")
    parser.add_argument("--local", action="store_true", help="starts: checkpoints are written to another folder, and copied")
    parser.add_argument("--keys", nargs="*", default=[], metavar="KEY=VALUE", help="goodput: more keys of the training")
    parser.add_argument("--least", type=int, help="elastic: continue with fewer ranks, down to this number (as many as before)")
    parser.add_argument(
        "--epochs",
        type=int,
        default=20,
        help="soak, elastic: number of epochs, each 1/60 of the data; elastic: at least twice as many as kills",
    )
    arguments = parser.parse_args()
    if arguments.what == "saves":
        saves(arguments.kills, arguments.seed)
    elif arguments.what == "starts":
        more = {"save_in_background": True} if arguments.background else {}
        starts(arguments.kills, arguments.seed, more | ({"checkpoint_local": True} if arguments.local else {}))
    elif arguments.what == "goodput":
        more = dict(pair.split("=", 1) for pair in arguments.keys)
        goodput(arguments.kills, arguments.every, arguments.seed, arguments.data, arguments.size, more)
    elif arguments.what == "elastic":
        least, epochs = arguments.least or arguments.size, max(arguments.epochs, 2 * arguments.kills)
        elastic(arguments.kills, arguments.seed, arguments.data, arguments.size, least, epochs)
    else:
        soak(arguments.kills, arguments.seed, arguments.data, arguments.ranks, arguments.epochs)


if __name__ == "__main__":
    main()
