#!/usr/bin/env python3
"""What all reports cost a training at once: `python benchmarks/everything.py`.

Trains a small network on one rank with steps of some 25 ms, alternately without reports and with all of them: lines of the log
at verbosity 5, steps.jsonl, TensorBoard, MLflow's file store, wandb's offline mode, a custom tracker, each every log_interval
(10 s), and a callback for every step. Both write scores.jsonl, best.json and a checkpoint. The time is that of the steps of an
epoch, after the trackers have begun. What happens once per training (opening the trackers, and the page for them at the end) is
printed apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_SILENT", "true")

from measuring import ROOT, machine  # noqa: E402  # after the number of threads

CONFIG = """
import time

import numpy
import torch

import hvdtrain

generator = numpy.random.default_rng(0)
train = [{{"data": generator.normal(size=(100, 80)).astype("float32")}} for _ in range({batch})] * {steps}
max_seqs = {batch}
num_epochs, num_threads, learning_rate = 1, 1, 1e-4
optimizer = {{"class": "adamw"}}
gradient_clip_global_norm = 5.0


class Own:
    def log_steps(self, epoch, step, numbers):
        pass


class Timing:
    began = ended = None

    def on_epoch_begin(self, training):
        time.sleep({settle} if {everything} else 0.0)  # trackers begin in separate threads
        Timing.began = time.perf_counter(), time.process_time()

    def on_epoch_end(self, training):
        Timing.ended = time.perf_counter(), time.process_time()


class EveryStep:
    count = 0

    def on_step_end(self, training):
        self.count += 1


callbacks = [Timing, EveryStep] if {everything} else [Timing]
if {everything}:
    trackers = [Own, *{services}]


def get_model(**_):
    layers = [torch.nn.Linear(80, 512)]
    for _ in range(4):
        layers += [torch.nn.ReLU(), torch.nn.Linear(512, 512)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(512, 80))


def train_step(*, model, extern_data, **_):
    data = extern_data["data"]
    hvdtrain.get_run_ctx().mark_as_loss((model(data.raw_tensor) - data.raw_tensor).square().mean(-1), "mse")
"""


def services(names: list[str], folder: Path) -> list[dict[str, Any]]:
    """The trackers of these names whose packages are installed."""
    known = {"mlflow": {"tracking_uri": str(folder / "mlruns")}, "wandb": {"mode": "offline", "dir": str(folder)}}
    return [{"class": name, **known[name]} for name in names if find_spec(name) is not None]


def train_once(folder: Path, sizes: dict[str, float], trackers: list[dict[str, Any]] | None) -> tuple[float, float, float]:
    """Train; the epoch's seconds and CPU seconds, and the seconds of the whole training."""
    from hvdtrain.run import train
    from hvdtrain.settings import read_settings

    folder.mkdir()
    everything = trackers is not None
    config = folder / "config.py"
    config.write_text(CONFIG.format(**sizes, everything=everything, services=trackers or []))
    keys = {"model": str(folder / "model"), "log": str(folder / "train.log"), "log_verbosity": "[5, 0]" if everything else "0"}
    keys |= {"use_tensorboard": str(everything)} if everything else {"log_interval": "1000000.0"}
    settings = read_settings([config], keys)
    began = time.perf_counter()
    train(settings)
    whole = time.perf_counter() - began
    timing = settings.callbacks.callbacks[0]
    return timing.ended[0] - timing.began[0], timing.ended[1] - timing.began[1], whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=450, help="steps of a training (450)")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds for the trackers to begin (3)")
    parser.add_argument("--batch", type=int, default=3, help="sequences of 100 frames in a step (3)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of trainings, after one that is not counted (7)")
    parser.add_argument("--services", default="mlflow,wandb", help="trackers in addition to the custom one (mlflow,wandb)")
    options = parser.parse_args()
    print(machine())
    names = [name for name in options.services.split(",") if name]
    found: dict[str, list[tuple[float, float, float]]] = {"nothing": [], "everything": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trackers = services(names, folder)
        print(f"trackers: own, {', '.join(one['class'] for one in trackers) or 'no services'}")
        for number in range(options.rounds + 1):
            order = list(found) if number % 2 else list(reversed(found))
            for kind in order:
                steps = options.steps if number else max(2, options.steps // 20)
                sizes = {"steps": steps, "batch": options.batch, "settle": options.settle}
                result = train_once(folder / f"{kind}{number}", sizes, trackers if kind == "everything" else None)
                if number:
                    found[kind].append(result)
    wall, cpu = (1000 * statistics.median(one[place] for one in found["nothing"]) / options.steps for place in (0, 1))
    print(f"a step without reports: {wall:.1f} ms, of CPU time {cpu:.1f} ms")
    print(f"| of an epoch of {options.steps} steps | everything relative to nothing ({options.rounds} pairs) |\n|---|---|")
    for place, what in enumerate(("wall-clock time", "CPU time of the process")):
        ratios = [one[place] / other[place] for one, other in zip(found["everything"], found["nothing"], strict=True)]
        print(f"| {what} | {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f}) |")
    once = [whole - seconds for seconds, _, whole in found["everything"]]
    print(f"| beginning and end, seconds once | {statistics.median(once):.1f} |")


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
