#!/usr/bin/env python3
"""Accuracy of the predictions of `--dry-run ++predict_ranks`: `python benchmarks/predictions.py`, on data/g2p (make data).

In every round, a dry run of configs/g2p.py on two ranks predicts the sequences per second of 1, 2 and 4 ranks on this host, and
an epoch is trained on each. Ranks compute with one thread, so a host of two cores has none left for the last two of 4 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import ROOT, machine

METHODS = {"grad": {}, "param, H = 1": {"step": 1}, "param, H = 16": {"step": 16}, "param, H = 64": {"step": 64}}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs" / "g2p.py"), help="(configs/g2p.py)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks (1 2 4)")
    parser.add_argument("--measured", type=int, default=2, help="number of ranks of the dry run (2)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="(all)")
    parser.add_argument("--rounds", type=int, default=3, help="dry runs, and epochs of each kind (3)")
    parser.add_argument("keys", nargs="*", default=["++max_seqs", "128", "++train.partition_epoch", "10"], help="after --")
    options = parser.parse_args()
    print(f"{machine()}; {' '.join(options.keys)}\n", flush=True)
    predicted: dict[tuple[int, str], list[float]] = {}
    trained: dict[tuple[int, str], list[float]] = {}
    for _ in range(options.rounds):
        for place, rate in predictions(options.config, options.measured, options.ranks, options.keys).items():
            predicted.setdefault(place, []).append(rate)
        for ranks in options.ranks:
            for method in options.methods if ranks > 1 else ["grad"]:
                rate = epoch(options.config, ranks, METHODS[method], options.keys)
                trained.setdefault((ranks, method), []).append(rate)
                print(f"{ranks} ranks, {method}: {predicted[ranks, method][-1]:.0f}, {rate:.0f}", file=sys.stderr, flush=True)
    print("| ranks | method | predicted sequences/s | trained | predicted / trained, median (range) |")
    print("|---|---|---|---|---|")
    for place, rates in trained.items():
        ratios = [one / other for one, other in zip(predicted[place], rates, strict=True)]
        print(
            f"| {place[0]} | {place[1]} | {statistics.median(predicted[place]):.0f} | {statistics.median(rates):.0f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


def predictions(config: str, measured: int, ranks: list[int], keys: list[str]) -> dict[tuple[int, str], float]:
    """By number of ranks, all on this host, and method, the sequences per second that a dry run predicts."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = ",".join(f"{number}:{number}" for number in ranks)
        out = run(measured, config, [*keys, "++model", f"{folder}/model", "--dry-run", "++predict_ranks", wanted])
    rows = re.findall(r"^predict: +(\d+):\d+[* ] +(grad|param, H = \d+) +([\d.e+]+) ", out, re.MULTILINE)
    return {(int(number), method): float(rate) for number, method, rate in rows}


def epoch(config: str, ranks: int, method: dict[str, int], keys: list[str]) -> float:
    """Train an epoch; sequences per second."""
    reduce = ["++horovod_reduce_type", "param", "++horovod_param_sync_step", str(method["step"])] if method else []
    with tempfile.TemporaryDirectory() as folder:
        run(ranks, config, [*keys, *reduce, "++num_epochs", "1", "++model", f"{folder}/model"])
        report = json.loads(Path(folder, "scores.jsonl").read_text())
    return float(report["num_sequences"] / report["elapsed"])


def run(ranks: int, config: str, arguments: list[str]) -> str:
    """Run hvdtrain on some ranks of this host, with one thread each; what it prints."""
    command = [sys.executable, "-m", "hvdtrain", config, "++num_threads", "1", "++log_verbosity", "3", *arguments]
    if ranks > 1:
        command = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", *command, "++use_horovod", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: expected exit status 0, got {done.returncode}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
