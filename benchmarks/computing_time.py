#!/usr/bin/env python3
"""The computing time, as in the log line of every epoch, of an acoustic-like training and of configs/g2p.py on two ranks.

The rest up to 100 % is spent waiting for data, planning the epoch and gathering its scores; it is printed by activity, in seconds
of the slowest rank. Sequences have about 500 frames of 80 features and about 50 labels.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from measuring import ROOT, machine

from hvdtrain.data.config_datasets import parse
from hvdtrain.plugins.hdf_tools.dump import dump
from hvdtrain.plugins.hdf_tools.peers import Peers
from hvdtrain.plugins.hdf_tools.sources import Selection
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

BENCHMARKS = ROOT / "benchmarks"


def main() -> int:
    """Create the data, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="(2)")
    parser.add_argument(
        "--acoustic", type=int, default=800, help="sequences per epoch of the acoustic training; 0 skips it (800)"
    )
    parser.add_argument("--words", type=int, default=10_000, help="words per epoch of configs/g2p.py; 0 skips it (10,000)")
    parser.add_argument("--data", type=Path, default=ROOT / "data/g2p/train.hdf", help="HDF file of the words")
    parser.add_argument("--epochs", type=int, default=2, help="(2)")
    options = parser.parse_args()
    if options.words and not options.data.exists():
        print(f"--data: expected an HDF file, got none at {options.data} (make data)", file=sys.stderr)
        return 2
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.acoustic:
            write_acoustic(folder / "acoustic.hdf", options.acoustic)
            train(options, "acoustic", [BENCHMARKS / "acoustic/config.py"], folder, {"folder": str(folder)})
        if options.words:
            source, problems = parse("train", str(options.data), {})
            assert source is not None, problems
            dump(source, folder / "words.hdf", Selection(end=options.words - 1), Peers())
            keys = {"train.files": str(folder / "words.hdf"), "max_seqs": str(256 // options.ranks), "log": "None"}
            train(options, "g2p", [ROOT / "configs/g2p.py"], folder, {**keys, "dev": "None", "eval": "None"})
    print(machine())
    return 0


def write_acoustic(path: Path, sequences: int) -> None:
    generator = numpy.random.default_rng(0)
    with HDFWriter(path, dims={"classes": 40}) as writer:
        for number in range(sequences):
            frames, labels = int(generator.integers(300, 701)), int(generator.integers(30, 71))
            sequence = {
                "data": generator.standard_normal((frames, 80), dtype=numpy.float32),
                "classes": generator.integers(0, 40, labels, dtype=numpy.int32),
            }
            writer.add(f"seq-{number}", sequence)


def train(options: argparse.Namespace, what: str, configs: list[Path], folder: Path, keys: dict[str, str]) -> None:
    """Train and print a line for every epoch."""
    model = folder / what / "model"
    keys = {"use_horovod": "1", "num_epochs": str(options.epochs), "model": str(model), **keys}
    command = ["mpirun", "-np", str(options.ranks), "--bind-to", "none", "--oversubscribe", sys.executable, "-m", "hvdtrain"]
    command += [*map(str, configs), *(word for name, value in keys.items() for word in (f"++{name}", value))]
    environment = dict(os.environ)
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    for line in (model.parent / "scores.jsonl").read_text(encoding="utf-8").splitlines():
        epoch = json.loads(line)
        seconds = {name: max(rank.get(name, 0.0) for rank in epoch["seconds"]) for name in epoch["seconds"][0]}
        activities = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        print(
            f"{what}, epoch {epoch['epoch']}: {epoch['steps']} steps, {epoch['elapsed']:.1f} s, "
            f"{epoch['computing']:.2%} computing time; {activities}",
            flush=True,
        )
    shutil.rmtree(model.parent)


if __name__ == "__main__":
    sys.exit(main())
