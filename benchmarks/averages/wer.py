#!/usr/bin/env python3
"""Word error rates of configs/g2p.py with AdamW, a moving average, averages of checkpoints, running averages, and Muon.

    make data
    python benchmarks/averages/wer.py --folder exp/averages

Each method trains with three seeds for the epochs of configs/g2p.py, on two ranks, and makes all averages at its end. The best
epochs are chosen by the development WER. The command may be stopped at any time: trainings resume where they were, and those
that are done are not repeated. A training takes an hour on two quiet cores, all of them a day; the speed of the machine has no
influence on the results. --only-table prints what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = [ROOT / "configs" / "g2p.py", Path(__file__).with_name("variants.py")]

Keys = dict[str, Any]

MUON: Keys = {
    "has_matrices": True,
    "optimizer": {"class": "muon", "weight_decay": 0.1, "others": {"class": "adamw", "weight_decay": 0.01, "betas": (0.9, 0.98)}},
}
METHODS: dict[str, Keys] = {
    "AdamW": {},
    "AdamW, moving average": {"ema_decay": 0.9995},
    "AdamW, decay to 20 %": {"final_share": 0.2},
    "AdamW, matrices": {"has_matrices": True},
    "Muon": MUON,
    "Muon, decay to 20 %": MUON | {"final_share": 0.2},
}
"""By name, the keys of a method."""

AVERAGES = [{"best": 5}, {"best": 10}, {"last": 5}, {"running": 2}, {"running": 4}, {"running": 8}]


def main() -> None:
    """Train what has not been trained yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the trainings are")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        choices=METHODS,
        metavar="METHOD",
        help="; ".join(METHODS).replace("%", "%%") + " (all)",
    )
    parser.add_argument("--epochs", type=int, default=24, help="(24)")
    parser.add_argument("--seeds", type=int, default=3, help="number of trainings of each method (3)")
    parser.add_argument("--ranks", type=int, default=2, help="(2)")
    parser.add_argument("--every", type=int, default=50, help="updates between two samples of the running average (50)")
    parser.add_argument("--only-table", action="store_true", help="train nothing")
    parser.add_argument("keys", nargs="*", default=[], help="after --: ++key value for all trainings")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM; the same command continues"))
    for seed in range(1, options.seeds + 1):  # so that a table of all methods is there early
        for method in options.methods if not options.only_table else ():
            train(options, method, seed)
    print(f"Results on the CMU dictionary, WER in %, mean of the seeds (range), {options.epochs} epochs:\n")
    print("| method | model | dev WER | test WER | seeds |\n|---|---|---|---|---|")
    for row in (row for method in options.methods for row in rows(options, method)):
        print(row)


def folder_of(options: argparse.Namespace, method: str, seed: int) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in method.lower()).replace("--", "-").strip("-")
    return Path(options.folder, f"{name}.{options.epochs}-epochs.seed-{seed}")


def train(options: argparse.Namespace, method: str, seed: int) -> None:
    """Train until the averages are made; what a stopped run has done is kept."""
    folder = folder_of(options, method, seed)
    if (folder / "averages.json").exists():
        return
    averages = [one for one in AVERAGES if next(iter(one.values())) <= options.epochs]
    given = METHODS[method] | {
        "num_epochs": options.epochs,
        "random_seed": seed,
        "model": folder / "model",
        "log": folder / "train.log",
        "max_seqs": None,
        "max_seqs_total": 256,
        "ngpu": options.ranks,
        "running_average": options.every,
        "average_checkpoints": averages,
        "cleanup_old_models": {"keep_last_n": 1, "keep_best_n": 0, "keep": []},
        "early_stopping_measure": "dev_loss_wer",
        "save_interval_minutes": 10,
    }
    words = [word for key, value in given.items() for word in (f"++{key}", str(value))]
    command = [sys.executable, "-m", "hvdtrain", *map(str, CONFIGS), *words, *options.keys]
    print(f"{method}, seed {seed}: {folder}", file=sys.stderr, flush=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate()
        except KeyboardInterrupt:  # Ctrl+C reaches the training, too, which ends with a checkpoint
            process.communicate()
            raise SystemExit("stopped; the same command continues") from None
        except SystemExit:
            process.terminate()
            process.communicate()
            raise
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: status {process.returncode}\n{out[-2000:]}\n{err[-4000:]}")


def results_of(folder: Path) -> dict[str, dict[str, float]]:
    """By model, its scores."""
    epochs = [json.loads(line)["scores"] for line in (folder / "scores.jsonl").read_text().splitlines()]
    found = {"last epoch": epochs[-1], "best epoch": min(epochs, key=lambda scores: scores["dev_loss_wer"])}
    return found | {one["name"]: one["scores"] for one in json.loads((folder / "averages.json").read_text())}


def rows(options: argparse.Namespace, method: str) -> Iterator[str]:
    """The rows of a method, for the seeds that are done."""
    folders = [folder_of(options, method, seed) for seed in range(1, options.seeds + 1)]
    done = [results_of(folder) for folder in folders if (folder / "averages.json").exists()]
    for model in done[0] if done else ():
        columns = [spread([100 * one[model][f"{part}_loss_wer"] for one in done]) for part in ("dev", "eval")]
        yield f"| {method} | {model} | {columns[0]} | {columns[1]} | {len(done)} |"


def spread(values: list[float]) -> str:
    """The mean, and the lowest and highest value."""
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
