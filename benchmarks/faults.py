#!/usr/bin/env python3
"""Measure how long a job takes to end after a fault, or to continue, for every launcher that this machine has, and whether the
fault is named. The exit status is 1 if a fault has another outcome than fault_rows.py expects, which the table shows in bold.

A training on several ranks of this host runs until the fault happens. The job has ended when its launcher and all of its ranks
are gone, and so that no process outlives a fault unnoticed, the table says how many ranks were left after --patience seconds.
Launchers that start ranks again (docs/elastic.md) have separate columns: there, a job that continues has done so when all ranks
that it has now have begun a step. srun has columns inside a job of Slurm that has one node:

    salloc -N1 -n3 python benchmarks/faults.py --launchers srun
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fault_rows import ROWS, Place
from measuring import ROOT, machine

sys.path.insert(0, str(ROOT))

from hvdtrain.plugins.trace.records import has_begun  # noqa: E402  # found through the line above

CONFIG = """
import sys, time
from pathlib import Path
import torch
from torch import nn
import hvdtrain

folder, fault = Path(config.value("folder")), config.value("fault")
sys.path.insert(0, config.value("benchmarks"))
from fault_rows import ROWS, Place

def slowly(sequence, **_):
    while hvdtrain.rank() == 1 and (folder / "blocked").exists():
        time.sleep(1)
    return sequence

train = {"class": "MapDataset", "dataset": {"class": "HDFDataset", "files": str(folder / "train.hdf")}, "map_seq": slowly}
max_seqs, num_epochs, num_threads, learning_rate, log_verbosity = 10, 10**6, 1, 0.01, 1

def get_model(**_):
    return nn.Linear(9, 2)

def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    begun = folder / "begun"
    if hvdtrain.rank() == 1 and context.epoch == 2 and not begun.exists():
        written = begun.with_suffix(".new")
        written.write_text(str(time.time()))
        written.rename(begun)
        if ROWS[fault].within:
            ROWS[fault].happen(Place(folder))
    data, classes = extern_data["data"], extern_data["classes"]
    scores = model(data.raw_tensor)
    if hvdtrain.rank() == 1 and (folder / "nan").exists():
        scores = scores * float("nan")
    loss = nn.functional.cross_entropy(scores[data.mask], classes.raw_tensor[classes.mask].long(), reduction="none")
    hvdtrain.get_run_ctx().mark_as_loss(loss, "ce")
"""


@dataclass(frozen=True)
class Launcher:
    """A way to start the ranks.

    Attributes:
        before: the command before `-m hvdtrain config.py`, made in a folder for its files.
        after: the arguments after it.
        left: how many ranks continue after one was lost; 0: the job ends.
    """

    before: Callable[[Path], list[str]]
    after: tuple[str, ...]
    left: int = 0


def launchers(ranks: int) -> dict[str, Launcher]:
    """By name."""
    found = {}
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    local = ("++ngpu", str(ranks))
    has_horovod = importlib.util.find_spec("horovod") is not None
    if shutil.which("mpirun") and has_horovod:
        mpirun = ["mpirun", "-np", str(ranks), "--bind-to", "none", "--oversubscribe", sys.executable]
        found["mpirun"] = Launcher(lambda _: mpirun, ("++use_horovod", "1"))
    if shutil.which("srun") and "SLURM_JOB_ID" in os.environ and has_horovod:
        for option in ("--mpi=pmix", "--mpi=none"):
            srun = ["srun", "-K", option, "-n", str(ranks), sys.executable]
            name = f"`srun -K {option}`"
            found[name] = Launcher(lambda _, srun=srun: srun, ("++use_horovod", "1"))
    if has_horovod:
        static = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--network-interface", "lo", "-np", str(ranks)]
        found["horovodrun"] = Launcher(lambda _: [*static, sys.executable], ("++use_horovod", "1"))
    found["torchrun"] = Launcher(lambda _: agent, ("++torch_distributed", "{}"))
    found[f"`++ngpu {ranks}`"] = Launcher(lambda _: [sys.executable], local)
    again = [*agent, "--max-restarts", "3"]
    found["torchrun `--max-restarts 3`"] = Launcher(lambda _: again, ("++torch_distributed", "{}"), ranks)
    found[f"`++ngpu {ranks} ++max_restarts 3`"] = Launcher(lambda _: [sys.executable], (*local, "++max_restarts", "3"), ranks)
    if has_horovod and ranks == 3:  # a host has three names, and of each that loses a rank, no rank is left
        found["horovodrun `--min-np 1`"] = Launcher(horovodrun, ("++use_horovod", "1"), ranks - 1)
    return found


def horovodrun(folder: Path) -> list[str]:
    """The command for Horovod's elastic driver, with one rank for each of three names of this host."""
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\nprintf '%s:1\\n' localhost 127.0.0.1 {socket.gethostname()}\n")
    script.chmod(0o755)
    driver = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--network-interface", "lo", "-np", "3", "--min-np", "1"]
    return [*driver, "--blacklist-cooldown-range", "300", "600", "--host-discovery-script", str(script), sys.executable]


@contextmanager
def prepared(has_disk: bool) -> Iterator[Path]:
    """A folder with the config and the data, and where it is needed a small disk for the model."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        (folder / "config.py").write_text(CONFIG)
        dump = [
            sys.executable,
            "-m",
            "hvdtrain",
            "dump",
            "{'class': 'Task12AXDataset', 'num_seqs': 400}",
            str(folder / "train.hdf"),
        ]
        subprocess.run(dump, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        (folder / "disk").mkdir()
        if has_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "faults", str(folder / "disk")], check=True)
        try:
            yield folder
        finally:
            if has_disk:
                subprocess.run(["umount", "-l", str(folder / "disk")], check=True)


def outcome(launcher: Launcher, fault: str, patience: float, verbose: bool) -> tuple[str, bool]:
    """Run a job with a fault: how long it took to end, with which status, or to continue; and whether that is as expected."""
    row = ROWS[fault]
    with prepared(row.needs_root) as folder:
        trace = folder / "trace"
        keys = {"fault": fault, "folder": folder, "benchmarks": Path(__file__).parent, "model": folder / "disk" / "model"}
        keys |= {"watchdog_timeout": 10} | ({"trace_sequences": trace} if launcher.left else {})
        arguments = [text for key, value in keys.items() for text in (f"++{key}", str(value))]
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        with (folder / "printed").open("w") as printed:
            process = subprocess.Popen(
                [*launcher.before(folder), "-m", "hvdtrain", str(folder / "config.py"), *arguments, *launcher.after],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
            )
            while not (folder / "begun").exists():
                if process.poll() is not None:
                    raise SystemExit(f"expected a training, got: {(folder / 'printed').read_text()}")
                time.sleep(0.01)
            if not row.within:
                (folder / "begun").write_text(str(time.time()))
                row.happen(Place(folder, process.pid))
            began = float((folder / "begun").read_text())
            goes_on = False
            while (process.poll() is None or ranks_of(folder)) and time.time() - began < patience and not goes_on:
                goes_on = launcher.left > 0 and has_begun(trace, 1, launcher.left)
                time.sleep(0.02)
            seconds = time.time() - began
            left = ranks_of(folder)
            if process.poll() is None:
                process.kill()
            for rank in left:
                end(rank)
            status = process.wait()
        text = (folder / "printed").read_text(errors="replace")
        if verbose:
            print(text, file=sys.stderr)
        damaged = [path.name for path in (folder / "disk").glob("model.*.pt") if not is_whole(path)]
        saved = any(".step-" in path.name for path in (folder / "disk").glob("model.*"))
    if goes_on:
        return f"{seconds:.1f} s to the next step", True
    if left:
        return f"**{len(left)} processes left** after {patience:.0f} s", False
    cell = f"{seconds:.1f} s, " + (
        f"status {status}" if row.within else f"{'with' if saved else 'without'} a checkpoint of the moment"
    )
    wrong = [f"**damaged: {', '.join(damaged)}**"] if damaged else []
    wrong += ["**status 0**"] if status == 0 else []
    wrong += ["**not named**"] if row.names is not None and re.search(row.names, text) is None else []
    return ", ".join([cell, *wrong]), not wrong


def is_whole(path: Path) -> bool:
    """Whether a checkpoint, which is a zip file, has all of its bytes."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def end(pid: int) -> None:
    """End a process, if it has not ended by itself meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def ranks_of(folder: Path) -> list[int]:
    """The processes whose command line names a folder, except for those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--launchers", nargs="+", help="names, or beginnings of names (default: all that are there)")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds after which processes that are left are ended (90)")
    parser.add_argument("--verbose", action="store_true", help="also what the jobs print, to stderr")
    options = parser.parse_args()
    commands = launchers(options.ranks)
    if options.launchers:
        plain = {name: name.replace("`", "").lstrip("+") for name in commands}
        exact = set(options.launchers) & set(plain.values())
        others = tuple(set(options.launchers) - exact) or ("-",)
        commands = {name: each for name, each in commands.items() if plain[name] in exact or plain[name].startswith(others)}
    print(f"{options.ranks} ranks; {machine()}\n\n| fault | {' | '.join(commands)} |\n|---|{'---|' * len(commands)}", flush=True)
    good = True
    for fault in options.faults:
        if ROWS[fault].needs_root and os.geteuid() != 0:
            continue
        cells = [outcome(command, fault, options.patience, options.verbose) for command in commands.values()]
        good &= all(is_expected for _, is_expected in cells)
        print(f"| {ROWS[fault].text} | {' | '.join(text for text, _ in cells)} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
