#!/usr/bin/env python3
"""What a step costs besides its computation, and what a start and a process cost: hvdtrain against loops and other trainers.

    python benchmarks/step_cost.py                                # one rank and two, PyTorch and Keras
    python benchmarks/step_cost.py --peers OTHER_VENV/bin/python  # with Accelerate and Lightning, where that Python has them

A linear layer of 9 units is trained on batches of 4 short sequences of the same map-style dataset (loops/small_steps.py), with
one thread for computing, so that nearly all of a step is overhead. Every trainer runs once a round, in a process for each rank;
the second of its two epochs counts. The CPU time of all threads is the figure to go by on a machine that others use, too.

The second table has the time from the command to the first epoch, and the memory that a rank has after the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measuring import ROOT, machine

LOOPS = ROOT / "benchmarks/loops"
HVDTRAIN = ["-m", "hvdtrain", str(LOOPS / "steps_config.py")]


@dataclass(frozen=True)
class Trainer:
    """What is compared.

    Attributes:
        words: of its command, after the Python.
        ranks: on how many it runs.
        starts: how two ranks are started: torchrun, mpirun, or '' if it starts them itself.
        against: the loop of the same framework; for a model of another trainer, hvdtrain with a train_step on the same batches.
        package: of the second environment; None: it runs in this one.
    """

    words: list[str]
    ranks: tuple[int, ...]
    starts: str
    against: str = "loop"
    package: str | None = None


def loop(name: str) -> list[str]:
    return [str(LOOPS / "small_steps.py"), name]


TRAINERS = {
    "loop": Trainer(loop("loop"), (1, 2), "torchrun"),
    "hvdtrain": Trainer(HVDTRAIN, (1, 2), ""),
    "hvdtrain, worker": Trainer([*HVDTRAIN, "++workers", "1"], (1, 2), ""),
    "accelerate": Trainer(loop("accelerate"), (1, 2), "torchrun", package="accelerate"),
    "lightning": Trainer(loop("lightning"), (1, 2), "torchrun", package="lightning"),
    "speechbrain": Trainer(loop("speechbrain"), (1,), "", package="speechbrain"),
    "transformers": Trainer(loop("transformers"), (1,), "", package="transformers"),
    "hvdtrain, collate": Trainer([*HVDTRAIN, "++collates", "1"], (1, 2), ""),
    **{
        f"hvdtrain, {name}": Trainer([*HVDTRAIN, "++plugin", name], (1, 2), "", base, package)
        for name, base, package in [
            ("lightning", "hvdtrain, collate", "lightning"),
            ("speechbrain", "hvdtrain, collate", "speechbrain"),
            ("transformers", "hvdtrain, collate", "transformers"),
            ("espnet", "hvdtrain", None),
        ]
    },
    "horovod loop": Trainer(loop("horovod"), (2,), "mpirun", "horovod loop"),
    "hvdtrain, horovod": Trainer([*HVDTRAIN, "++use_horovod", "1"], (2,), "mpirun", "horovod loop"),
    "keras loop": Trainer(loop("keras"), (1, 2), "mpirun", "keras loop"),
    "hvdtrain, keras": Trainer([*HVDTRAIN, "++backend", "tensorflow", "++use_horovod", "1"], (1, 2), "mpirun", "keras loop"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TRAINERS, default=list(TRAINERS), help="the trainers to compare (all)")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2], help="numbers of ranks (1 2)")
    parser.add_argument("--rounds", type=int, default=11, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="of an epoch (%(default)s)")
    parser.add_argument("--decode", type=float, default=0.0, help="microseconds of Python to read a sequence (0)")
    parser.add_argument("--peers", default=sys.executable, help="the Python with Accelerate and Lightning (this one)")
    options = parser.parse_args()
    os.environ["STEPS_DECODE"] = str(options.decode)
    packages = {TRAINERS[name].package for name in options.only} - {None}
    missing = [one for one in packages if subprocess.run([options.peers, "-c", f"import {one}"], capture_output=True).returncode]
    for package in missing:
        print(f"{package}: not installed in {options.peers} (pip install -e '.[peers]')")
    for ranks in options.ranks:
        names = [name for name in options.only if ranks in TRAINERS[name].ranks and TRAINERS[name].package not in missing]
        print(f"\n{machine()}\n")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                found[name].append(measure(TRAINERS[name], ranks, options.steps, options.peers))
        print_table(found, ranks)
    return 0


def measure(trainer: Trainer, ranks: int, steps: int, peers: str) -> dict[str, float]:
    """Train once: of the slowest rank, microseconds per step (CPU time, and as they passed), seconds of the start and MB."""
    with tempfile.TemporaryDirectory(prefix="step_cost.") as folder:
        python = peers if trainer.package is not None and trainer.words[: len(HVDTRAIN)] != HVDTRAIN else sys.executable
        command = [python, *trainer.words]
        if trainer.words[: len(HVDTRAIN)] == HVDTRAIN:
            command += ["++model", f"{folder}/model", *(["++ngpu", str(ranks)] if ranks > 1 and not trainer.starts else [])]
        if ranks > 1 and trainer.starts == "torchrun":
            command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        elif ranks > 1 and trainer.starts:
            yields = ["--mca", "mpi_yield_when_idle", "1"]
            command = ["mpirun", "--bind-to", "none", "--oversubscribe", *yields, "-np", str(ranks), *command]
        environment = os.environ | {
            "STEPS_OF_EPOCH": str(steps),
            "STEPS_RECORD": f"{folder}/record",
            "STEPS_BEGAN": str(time.time()),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        records = [path.read_text().splitlines() for path in Path(folder).glob("record.*")]
        if done.returncode or len(records) != ranks:
            raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        last = [json.loads(lines[-1]) for lines in records]
    units = {"cpu": 1e6 / steps, "wall": 1e6 / steps, "start cpu": 1.0, "start": 1.0, "resident": 1e-6}
    return {what: unit * max(one[what] for one in last) for what, unit in units.items()}


def print_table(found: dict[str, list[dict[str, float]]], ranks: int) -> None:
    """Medians with ranges, and the difference to the loop within a round, or the ratio."""
    print(f"| {ranks} rank(s) | CPU us a step | us a step | over the loop, CPU us | over the loop, us |\n|---|---|---|---|---|")
    for name, runs in found.items():
        columns = [summary([run[what] for run in runs]) for what in ("cpu", "wall")]
        for what in ("cpu", "wall"):
            columns.append(summary([own[what] - other[what] for own, other in against_loop(found, name)]))
        print(f"| {name} | {' | '.join(columns)} |", flush=True)
    print(f"\n| {ranks} rank(s) | CPU s to start | s to start | resident MB | over the loop's: CPU s | s | MB |")
    print("|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        columns = [summary([run["start cpu"] for run in runs], 2), summary([run["start"] for run in runs], 2)]
        columns.append(summary([run["resident"] for run in runs]))
        for what in ("start cpu", "start", "resident"):
            columns.append(summary([own[what] / other[what] for own, other in against_loop(found, name)], 2))
        print(f"| {name} | {' | '.join(columns)} |", flush=True)


def against_loop(found: dict[str, list[dict[str, float]]], name: str) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Each run with that of the loop in the same round."""
    return list(zip(found[name], found.get(TRAINERS[name].against, ()), strict=False))


def summary(values: list[float], digits: int = 0) -> str:
    if not values:
        return ""
    middle, least, most = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least} to {most})"


if __name__ == "__main__":
    sys.exit(main())
