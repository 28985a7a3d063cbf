#!/usr/bin/env python3
"""Accuracy of the estimates of a dry run: `python benchmarks/dry_run.py`, on data/g2p (make data).

Alternately a dry run and an epoch of configs/g2p.py, on one rank with one thread. By default, both programs measure CPU time
instead of wall time, because other programs affect it little; --clock wall measures wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import ROOT, machine

PROGRAM = """
import sys, time
if sys.argv.pop(1) == "processor":
    time.perf_counter = time.process_time
from hvdtrain.cli import main
sys.exit(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="pairs of a dry run and an epoch (3)")
    parser.add_argument(
        "--parts", type=int, default=5, help="partition_epoch, the number of parts of the data, of which an epoch has one (5)"
    )
    parser.add_argument("--clock", choices=("processor", "wall"), default="processor")
    options = parser.parse_args()
    print(f"{machine()}; seconds of the {options.clock}\n")
    print("| training: estimated, taken | evaluation | memory, MB | estimated / taken |\n|---|---|---|---|")
    for _ in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            keys = {
                "model": f"{folder}/model",
                "log": None,
                "num_epochs": 1,
                "num_threads": 1,
                "train.partition_epoch": options.parts,
            }
            overrides = [str(part) for name, value in keys.items() for part in (f"++{name}", value)]
            out, _ = run(options.clock, [*overrides, "--dry-run"])
            _, memory = run(options.clock, overrides)
            epoch = json.loads(Path(folder, "scores.jsonl").read_text())
        parts = {
            name: int(steps) * float(each)
            for name, steps, each in re.findall(r"estimate: (\w+): .*\((\d+) steps? of (\S+) s", out)
        }
        estimated_memory = float(re.findall(r"estimate: memory: ([\d.]+) MB", out)[0])
        training, taken = parts.pop("train"), epoch["elapsed"]
        evaluation, evaluated = sum(parts.values()), epoch["seconds"][0]["evaluation"]
        print(
            f"| {training:.1f}, {taken:.1f} | {evaluation:.1f}, {evaluated:.1f} | {estimated_memory:.0f}, {memory:.0f} | "
            f"time {(training + evaluation) / (taken + evaluated):.2f}, memory {estimated_memory / memory:.2f} |",
            flush=True,
        )


def run(clock: str, arguments: list[str]) -> tuple[str, float]:
    """Run hvdtrain and return its output and its peak memory in MB."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, clock, str(ROOT / "configs" / "g2p.py"), *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        out = process.stdout.read() if process.stdout else ""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"hvdtrain: expected exit status 0, got {process.returncode}")
    return out, used.ru_maxrss / 1024


if __name__ == "__main__":
    main()
