#!/usr/bin/env python3
"""The cost of everything that looks at a training, at once: `python benchmarks/monitoring.py`, on data/g2p (make data).

configs/g2p.py is trained on one rank with one thread, without any of it and with all of it: a log of steps, steps.jsonl,
TensorBoard, MLflow's file store, wandb for its offline mode (each where it is installed), a callback with every method, and
`track_epoch`. Runs alternate. Times are seconds of rank 0 in whole epochs, saving included, after the first one of each run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import ROOT, machine

from hvdtrain.training.callbacks import EVENTS

NOTHING = "log_interval = 0\nlog_verbosity = 3\n"

ALL = f"""
log_verbosity = 5
use_tensorboard = {{tensorboard}}
trackers = {{trackers}}

class Watching:
    def __init__(self):
        self.calls = 0
    def note(self, training):
        self.calls += 1
    {" = ".join(EVENTS)} = note

callbacks = [Watching()]

def track_epoch(*, epoch, step, metrics, **_):
    assert metrics
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (3)")
    parser.add_argument("--epochs", type=int, default=7, help="epochs of a run, with the first one (7)")
    parser.add_argument("--max_seqs", type=int, default=32, help="words of a step (32)")
    parser.add_argument("--partition_epoch", type=int, default=24, help="an epoch is so much of the data (24)")
    options = parser.parse_args()
    trackers = [{"class": name, **arguments} for name, arguments in TRACKERS.items() if importlib.util.find_spec(name)]
    tensorboard = importlib.util.find_spec("tensorboard") is not None
    print(f"{machine()}; trackers: {', '.join(str(each['class']) for each in trackers) or 'none'}; TensorBoard: {tensorboard}\n")
    kinds = {"nothing": NOTHING, "everything": ALL.format(trackers=trackers, tensorboard=tensorboard)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    steps = 0
    for round in range(options.rounds):
        for name in sorted(kinds, reverse=round % 2 == 0):
            own, steps = train(kinds[name], options)
            seconds[name].append(statistics.median(own))
            print(f"{name}: {' '.join(f'{each:.3f}' for each in own)} s", file=sys.stderr, flush=True)
    print("| what | seconds of an epoch | ms of a step |\n|---|---|---|")
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"| {name} | {median:.3f} ({min(found):.3f} to {max(found):.3f}) | {1e3 * median / steps:.1f} |")
    ratios = [every / none for every, none in zip(seconds["everything"], seconds["nothing"], strict=True)]
    print(f"\neverything / nothing: {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")


TRACKERS = {"mlflow": {"tracking_uri": "mlruns", "experiment_name": "g2p"}, "wandb": {"mode": "offline"}}


def train(text: str, options: argparse.Namespace) -> tuple[list[float], int]:
    """Seconds of each epoch after the first, and the steps of one."""
    with tempfile.TemporaryDirectory() as folder:
        extra = Path(folder) / "extra.py"
        extra.write_text(text)
        keys = {
            "model": f"{folder}/model",
            "log": f"{folder}/train.log",
            "num_threads": 1,
            "num_epochs": options.epochs,
            "max_seqs": options.max_seqs,
            "train.partition_epoch": options.partition_epoch,
            "dev": None,
            "eval": None,
        }
        overrides = [word for key, value in keys.items() for word in (f"++{key}", str(value))]
        command = [sys.executable, "-m", "hvdtrain", str(ROOT / "configs" / "g2p.py"), str(extra), *overrides]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        finished = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if finished.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: status {finished.returncode}\n{finished.stderr}")
        failures = [line for line in finished.stdout.splitlines() if "tracker" in line and "warning" in line.lower()]
        assert not failures, failures
        epochs = [json.loads(line) for line in (Path(folder) / "scores.jsonl").read_text().splitlines()]
    assert len(epochs) == options.epochs
    return [sum(epoch["seconds"][0].values()) for epoch in epochs[1:]], epochs[-1]["steps"]


if __name__ == "__main__":
    main()
