#!/usr/bin/env python3
"""Word error rates of configs/g2p.py with averaged gradients and with parameter averaging, against what the ranks send.

    make data
    python benchmarks/local_updates.py --results exp/local_updates.jsonl

Two ranks train with the same sequences in each method: 2 epochs with each of its tries, which differ in the learning rate or the
momentum, then, with the try of the lowest development WER, 4 epochs with each of three seeds. All methods have equally many
tries. Every training appends a line to --results, and the command continues where it was stopped: in all, it takes some six
hours on two quiet cores. The speed of the machine has no influence on the results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import ROOT

Keys = dict[str, Any]

RATES: list[Keys] = [{"learning_rate": rate} for rate in (0.001, 0.002, 0.003, 0.0045, 0.0067, 0.01)]
MOMENTA: list[Keys] = [
    {"learning_rate": rate, "horovod_param_outer.momentum": momentum}
    for rate in (0.002, 0.003, 0.0045)
    for momentum in (0.25, 0.5)
]


def averaging(step: int, **others: Any) -> Keys:
    return {"horovod_reduce_type": "param", "horovod_param_sync_step": step, **others}


BLOCKS = {"horovod_param_outer": {"class": "bmuf"}}
METHODS: dict[str, tuple[Keys, list[Keys]]] = {
    "grad": ({}, RATES),
    "param, H = 16": (averaging(16), RATES),
    "param, H = 16, block momentum": (averaging(16, **BLOCKS), MOMENTA),
    "param, H = 64": (averaging(64), RATES),
    "param, H = 64, block momentum": (averaging(64, **BLOCKS), MOMENTA),
}
"""By name: what all of its trainings have in common, and its tries."""


def compressed(*names: str) -> dict[str, Keys]:
    return {name: {"horovod_compression": name} for name in names}


NARROW: dict[str, dict[str, Keys]] = {
    "grad": {
        **compressed("fp16"),
        **{f"PowerSGD {rank}": {"horovod_compression": "powersgd", "horovod_compression_rank": rank} for rank in (1, 2, 4)},
    },
    "param, H = 16, block momentum": compressed("fp16"),
    "param, H = 64": compressed("int4"),
    "param, H = 64, block momentum": compressed("int8", "int4", "int2"),
}
"""By method: the names of smaller messages, with which it is also trained with the same try, and their keys."""


def main() -> None:
    """Train what is not in the results yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="a file with a line for each training that is done")
    parser.add_argument("--config", default=str(ROOT / "configs" / "g2p.py"), help="(configs/g2p.py)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="(all)")
    parser.add_argument("--tuning-epochs", type=int, default=2, help="epochs of a try (2)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of the trainings that are compared (4)")
    parser.add_argument("--seeds", type=int, default=3, help="number of trainings that are compared (3)")
    parser.add_argument("keys", nargs="*", default=["++max_seqs", "128"], help="after --, for all trainings (++max_seqs 128)")
    options = parser.parse_args()
    results = Results(options)
    tuned = {
        name: min(METHODS[name][1], key=lambda each: results.wer(name, each, 1, options.tuning_epochs))
        for name in options.methods
    }
    for seed in range(1, options.seeds + 1):
        for name in options.methods:
            for each in variants(name):
                results.wer(each, tuned[name], seed, options.epochs)
    print_tries(results, options)
    print_comparison(results, tuned, options)


class Results:
    """The trainings that are done, in a file; those that are not are done when they are asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        lines = options.results.read_text().splitlines() if options.results.exists() else []
        self._done: dict[str, dict[str, Any]] = {json.loads(line)["training"]: json.loads(line) for line in lines}

    def of(self, name: str, keys: Keys, seed: int, epochs: int) -> dict[str, Any]:
        """What came of a training: the WER, the number of syncs, and the bytes that a rank sent."""
        training = json.dumps([name, keys, seed, epochs])
        if training not in self._done:
            done = {"training": training, **train(self._options, name, keys, seed, epochs)}
            with self._options.results.open("a") as file:
                file.write(json.dumps(done) + "\n")
            self._done[training] = done
            print(f"{training}: {done}", file=sys.stderr, flush=True)
        return self._done[training]

    def wer(self, name: str, keys: Keys, seed: int, epochs: int) -> float:
        """The development WER."""
        return float(self.of(name, keys, seed, epochs)["dev"])


def variants(name: str) -> dict[str, Keys]:
    """A method, with messages in float32 and smaller ones: by name, the keys that its trainings have in common."""
    common, _ = METHODS[name]
    return {name: common, **{f"{name}, {message}": {**common, **keys} for message, keys in NARROW.get(name, {}).items()}}


def train(options: argparse.Namespace, name: str, keys: Keys, seed: int, epochs: int) -> dict[str, Any]:
    """Train on two ranks."""
    common = next(found[name] for method in METHODS if name in (found := variants(method)))
    given = {**common, **keys, "num_epochs": epochs, "random_seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        given |= {"ngpu": 2, "model": f"{folder}/model", "log": f"{folder}/log", "log_interval": 0, "cleanup_old_models": True}
        overrides = [word for key, value in given.items() for word in (f"++{key}", str(value))]
        command = [sys.executable, "-m", "hvdtrain", options.config, *overrides, *options.keys]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        finished = subprocess.run(command, env=environment, capture_output=True, text=True)
        if finished.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: status {finished.returncode}\n{finished.stderr}")
        lines = [json.loads(line) for line in Path(folder, "scores.jsonl").read_text().splitlines()]
    assert len(lines) == epochs, lines
    return {
        "dev": lines[-1]["scores"]["dev_loss_wer"],
        "test": lines[-1]["scores"]["eval_loss_wer"],
        "steps": sum(line["steps"] for line in lines),
        "syncs": sum(line["syncs"] for line in lines),
        "sent": sum(line["sent"] for line in lines),
    }


def print_tries(results: Results, options: argparse.Namespace) -> None:
    """The development WER of each try."""
    print(f"\nDevelopment WER after {options.tuning_epochs} epochs, %:\n\n| method | tries |\n|---|---|")
    for name in options.methods:
        tries = [(each, results.wer(name, each, 1, options.tuning_epochs)) for each in METHODS[name][1]]
        print(f"| {name} | {'; '.join(f'{described(each)}: {100 * wer:.2f}' for each, wer in tries)} |")


def print_comparison(results: Results, tuned: dict[str, Keys], options: argparse.Namespace) -> None:
    """The WERs of the trainings that are compared."""
    seeds = range(1, options.seeds + 1)
    print(f"\nWER after {options.epochs} epochs, %, mean of {options.seeds} seeds (range):\n")
    print("| method | best try | dev WER | test WER | syncs | MB sent by each rank |\n|---|---|---|---|---|---|")
    for wide in options.methods:
        for name in variants(wide):
            done = [results.of(name, tuned[wide], seed, options.epochs) for seed in seeds]
            dev, test = ([100 * each[part] for each in done] for part in ("dev", "test"))
            columns = [
                name,
                described(tuned[wide]),
                spread(dev),
                spread(test),
                str(done[0]["syncs"]),
                f"{done[0]['sent'] / 1e6:.0f}",
            ]
            print(f"| {' | '.join(columns)} |", flush=True)


def spread(rates: list[float]) -> str:
    """Mean and range."""
    return f"{statistics.fmean(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"


def described(keys: Keys) -> str:
    """A try, in short."""
    return ", ".join(f"{key.split('.')[-1].replace('_', ' ')} {value}" for key, value in keys.items())


if __name__ == "__main__":
    main()
