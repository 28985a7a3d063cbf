"""Training speed of hvdtrain compared with RETURNN's, with the same config files.

    pip install -e ".[benchmark]"
    python benchmarks/returnn_training.py                       # 1 and 2 ranks, 5 rounds: 6 minutes
    python benchmarks/returnn_training.py --rounds 1 --models mlp
    python benchmarks/returnn_training.py --horovod             # hvdtrain with Horovod on several ranks, too
    python benchmarks/returnn_training.py --models ff lstm attention   # TensorFlow networks, on two ranks with Horovod

as_returnn/mlp.config has a multilayer perceptron of PyTorch (2 x 512, batches of 10,000 frames), as_returnn/conformer.config a
conformer of RETURNN's frontend with CTC. Each is run as it is by `python -m returnn` and `python -m hvdtrain`, on several ranks
under torchrun, with one thread a rank, no cache and no evaluation. RETURNN reads data in a separate process, its default.
ff.config, lstm.config and attention.config have networks of RETURNN's layers, and Horovod on several ranks.

The config itself records the time of the last epoch (as_returnn/recorded.py), from the begin of its first step to the end of its
last one on the slowest rank: start-up, planning and saving are not in it, waiting for data is. On several ranks RETURNN ends an
epoch when the first rank has no data left, so what is compared are frames per second. The programs take turns, the ratio is
within a round, and its median over the rounds is the result.

The CPU time of a step is that of the thread that trains, which other programs on the machine affect little, and that of all
threads and of the processes that read data. On one rank both programs train on the same batches in the same order, and the
largest difference of the weights after the first epoch is printed.

With TensorFlow, one epoch is trained, and measured without its first ten steps. Threads of TensorFlow compute, so that the CPU
time of the thread that trains says little.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import returnn_reader
import torch
from measuring import ROOT, machine

from hvdtrain.plugins.hdf_tools.writer import HDFWriter

CONFIGS = ROOT / "benchmarks/as_returnn"
FEATURES, CLASSES, EPOCHS = 40, 64, 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
MPIRUN = ["mpirun", "--bind-to", "none", "--oversubscribe", "-np"]


@dataclass(frozen=True)
class Model:
    """A config.

    Attributes:
        batch_size: frames of a rank's batch.
        sequences: those of an epoch.
        per_frame: whether there is a class for each frame.
        is_network: whether it is a network of RETURNN's layers, with TensorFlow.
    """

    batch_size: int
    sequences: int
    per_frame: bool = True
    is_network: bool = False

    @property
    def epochs(self) -> int:
        return 1 if self.is_network else EPOCHS


MODELS = {
    "mlp": Model(10_000, 600),
    "conformer": Model(3_000, 200, per_frame=False),
    "ff": Model(1_000, 4_000, is_network=True),
    "lstm": Model(1_000, 600, is_network=True),
    "attention": Model(1_000, 300, per_frame=False, is_network=True),
}


@dataclass(frozen=True)
class Run:
    """The last epoch of a training.

    Attributes:
        rate: frames per second, of all ranks together.
        thread: CPU milliseconds per step of the thread that trains, mean of the ranks.
        cpu: those of all threads and processes.
        steps: of a rank.
        computing: the computing time as the program prints it, a fraction.
        weights: after the first epoch.
    """

    rate: float
    thread: float
    cpu: float
    steps: int
    computing: float
    weights: dict[str, Any]


def main() -> int:
    options = parse_options()
    returnn_reader.check()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="returnn_training.") as place:
        for name in options.models:
            write(Path(place) / f"{name}.hdf", int(MODELS[name].sequences * options.scale), MODELS[name].per_frame)
        print("| config | ranks | program | frames/s | hvdtrain relative to RETURNN | CPU ms a step | in all | computing time |")
        print("|---|---|---|---|---|---|---|---|")
        apart = {name: measure(name, ranks, Path(place), options) for name in options.models for ranks in options.ranks}
    print("; ".join(f"{name}, 1 rank: weights at most {most:.0e} apart" for name, most in apart.items() if most is not None))
    print(machine())
    return 0


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mlp", "conformer"], help="the configs (mlp conformer)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1], help="numbers of ranks (2 1)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of sequences (%(default)s)")
    parser.add_argument("--horovod", action="store_true", help="on several ranks, run hvdtrain with Horovod, too")
    parser.add_argument("--keep", type=Path, help="a folder for what each program prints")
    return parser.parse_args()


def write(path: Path, sequences: int, per_frame: bool) -> None:
    """Write features of 50 to 250 frames, and a class for each frame or a label for about every ten."""
    generator = numpy.random.default_rng(0)
    with HDFWriter(path, dims={"classes": CLASSES}) as writer:
        for number in range(sequences):
            length = int(generator.integers(50, 251))
            labels = generator.integers(0, CLASSES, length if per_frame else length // 10, dtype=numpy.int32)
            frames = generator.standard_normal((length, FEATURES), dtype=numpy.float32)
            writer.add(f"seq-{number}", {"data": frames, "classes": labels})


def measure(name: str, ranks: int, folder: Path, options: argparse.Namespace) -> float | None:
    """Print the lines of a config on a number of ranks. Returns the largest difference of the weights, on one rank."""
    has_choice = options.horovod and ranks > 1 and not MODELS[name].is_network
    programs = ["RETURNN", "hvdtrain", *(["hvdtrain, Horovod"] if has_choice else [])]
    runs: dict[str, list[Run]] = {program: [] for program in programs}
    for turn in range(options.rounds):
        shift = turn % len(programs)
        for program in programs[shift:] + programs[:shift]:
            runs[program].append(train(program, name, ranks, folder, options.keep))
    for program, found in runs.items():
        ratios = [own.rate / other.rate for own, other in zip(found, runs["RETURNN"], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        middle = {of: statistics.median(getattr(one, of) for one in found) for of in ("rate", "thread", "cpu", "computing")}
        print(
            f"| {name} | {ranks} | {program} | {middle['rate']:,.0f} | {spread if program != 'RETURNN' else ''} "
            f"| {middle['thread']:.1f} | {middle['cpu']:.1f} ({found[0].steps} steps) | {middle['computing']:.2%} |",
            flush=True,
        )
    one, other = (runs[program][0].weights for program in ("RETURNN", "hvdtrain"))
    return max(float((one[key] - other[key]).abs().max()) for key in one) if ranks == 1 else None


def train(program: str, name: str, ranks: int, folder: Path, keep: Path | None) -> Run:
    """Run a training, and read what it recorded."""
    for path in folder.iterdir():
        if path.suffix != ".hdf":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    environment = os.environ | {
        "AS_RETURNN_FOLDER": str(folder),
        "AS_RETURNN_BATCH_SIZE": str(MODELS[name].batch_size),
        "AS_RETURNN_EPOCHS": str(MODELS[name].epochs),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    start = [sys.executable] if ranks == 1 else [*TORCHRUN, str(ranks)]
    with_horovod = program == "hvdtrain, Horovod" or (MODELS[name].is_network and ranks > 1)
    if with_horovod:
        start = [*MPIRUN, str(ranks), sys.executable]
    module, config = "returnn" if program == "RETURNN" else "hvdtrain", str(CONFIGS / f"{name}.config")
    overrides = ["++use_horovod", "1"] if with_horovod else []
    command = [*start, "-m", module, config, *overrides]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{program}.{name}.{ranks}.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return read(MODELS[name], folder, ranks, done.stdout)


def read(model: Model, folder: Path, ranks: int, printed: str) -> Run:
    """The last epoch of the training in a folder."""
    records = [path.read_text().splitlines() for path in folder.glob("record.*")]
    lines = [of_sessions(record) if model.is_network else json.loads(record[-1]) for record in records]
    if len(lines) != ranks or {line["epoch"] for line in lines} != {model.epochs}:
        raise SystemExit(f"{folder}: expected a record of {model.epochs} epochs by each of {ranks} ranks, got {lines}\n{printed}")
    seconds = max(line["end"] for line in lines) - min(line["begin"] for line in lines)
    scores = folder / "scores.jsonl"
    if scores.exists():
        computing = json.loads(scores.read_text().splitlines()[-1])["computing"]
    else:
        computing = float(re.findall(r"\(([\d.]+)% computing time", printed)[-1]) / 100
    return Run(
        rate=sum(line["frames"] for line in lines) / seconds,
        thread=1000 * sum(line["thread"] / line["steps"] for line in lines) / ranks,
        cpu=1000 * sum(line["cpu"] / line["steps"] for line in lines) / ranks,
        steps=lines[0]["steps"],
        computing=computing,
        weights=read_weights(folder / "model.001"),
    )


def of_sessions(record: list[str]) -> dict[str, float]:
    """The calls of a session, as an epoch."""
    calls = numpy.array([json.loads(line) for line in record])
    begin, thread, cpu = calls[0, :3]
    last = dict(zip(("end", "thread", "cpu"), calls[-1, 3:6] - [0, thread, cpu], strict=True))
    return {"epoch": 1, "begin": begin, **last, "frames": calls[:, 6].sum(), "steps": len(calls)}


def read_weights(model: Path) -> dict[str, Any]:
    """The parameters in a checkpoint of either framework, given the path without the suffix."""
    if not model.with_suffix(".001.index").exists():
        return dict(torch.load(model.with_suffix(".001.pt"), weights_only=True)["model"])
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(model))
    return {name: torch.as_tensor(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map()}


if __name__ == "__main__":
    sys.exit(main())
