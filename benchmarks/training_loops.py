"""Training speed of hvdtrain compared with hand-written loops, in sequences per second.

    python benchmarks/training_loops.py                      # 1 and 2 ranks, 5 pairs
    python benchmarks/training_loops.py --pairs 1 --steps 5  # a quick look
    python benchmarks/training_loops.py --large              # 20 M parameters and 16 sequences a step: communication shows

All variants train the model of configs/g2p.py on the same batches in the same order, with the same initial weights, dropout,
loss, optimizer, number of threads and mpirun flags:

    hvdtrain        python -m hvdtrain, the program itself
    horovod         loops/horovod_loop.py: DistributedOptimizer, data read inline with h5py
    horovod, yield  the same under `mpirun --mca mpi_yield_when_idle 1`: Open MPI does not spin while it waits (hvdtrain sets
                    this itself if ranks share cores)
    ddp             loops/ddp_loop.py: DistributedDataParallel over gloo, data read by the same code

--large adds hvdtrain in other ways, whose ratios to the loops are printed, too:

    gloo            over torch.distributed, as ddp
    fp16            horovod_compression = "fp16"
    H = 16          horovod_reduce_type = "param": parameters are averaged after 16 updates; with the default of 32 steps twice

A run has two epochs of --steps steps. The first one is a warm-up; the second one is timed from before the first batch is read
until after the last update. For hvdtrain this is `elapsed` in scores.jsonl, which includes planning the epoch and gathering its
scores, but not saving checkpoints. The slowest rank determines the speed of a job. The CPU time is that of all threads of all
ranks; waiting for other programs on the machine is not in it, but waiting for another rank is where a transport polls.

A pair is one run of each variant, in immediate succession, so that the state of the machine is about the same; the order rotates
from pair to pair. The result is the ratio within a pair, and its median over the pairs. Every run checks that all variants
compute the same: the relative difference of the mean losses of the timed epoch may be 1e-4 (but for fp16 and H = 16).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
from measuring import machine

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.feed import Feed
from hvdtrain.data.opening import open_dataset
from hvdtrain.plugins.hdf_tools.dump import dump
from hvdtrain.plugins.hdf_tools.peers import Peers
from hvdtrain.plugins.hdf_tools.sources import Selection
from hvdtrain.settings import read_settings

ROOT = Path(__file__).resolve().parent.parent
LOOPS = ROOT / "benchmarks/loops"
CONFIGS = [ROOT / "configs/g2p.py", LOOPS / "config.py"]
LOOP_VARIANTS = ("horovod", "horovod, yield", "ddp")
HVDTRAIN: dict[str, dict[str, str]] = {
    "hvdtrain": {"use_horovod": "1"},
    "gloo": {"torch_distributed": "{'backend': 'gloo'}"},
    "fp16": {"use_horovod": "1", "horovod_compression": "fp16"},
    "H = 16": {"use_horovod": "1", "horovod_reduce_type": "param", "horovod_param_sync_step": "16"},
}
"""The overrides of each way to run hvdtrain."""

OTHERWISE = ("fp16", "H = 16")
"""Those that do not compute the same."""

CHANNELS, LARGE = 160, 536  # 1.8 million parameters, and 20 million
EPOCHS = 2
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Job:
    """The settings that all variants share.

    Attributes:
        data: the HDF file with the sequences of one epoch.
        batches: file with the batches that hvdtrain plans, for the hand-written loops: (ranks, epochs, steps, sequences).
        folder: where a run writes its files.
        batch: sequences in the batch of a rank.
        reading: how the hand-written loops read data.
        channels: the width of the model.
        variants: what is compared.
    """

    data: Path
    batches: Path
    folder: Path
    ranks: int
    batch: int
    threads: int
    reading: str
    channels: int
    variants: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """The result of a run: the rate of the whole job, its CPU seconds and the mean loss in the timed epoch."""

    sequences_per_second: float
    cpu: float
    loss: float


def main() -> int:
    options = parse_options()
    if not options.data.exists():
        print(f"--data: expected an HDF file, got none at {options.data} (make data)", file=sys.stderr)
        return 2
    agree = True
    with tempfile.TemporaryDirectory(prefix="training_loops.") as folder:
        for ranks in options.ranks:
            threads = options.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
            job = prepare(options, Path(folder), ranks, threads)
            where = "the file" if job.reading == "h5py" else "memory"
            print(
                f"\n{ranks} rank(s), {threads} thread(s) and {job.batch} sequences a step each, {options.steps} steps; "
                f"hand-written loops read from {where}"
            )
            pairs = list(run_pairs(job, options.pairs))
            print_table(job, pairs)
            agree &= losses_agree(job, pairs)
    return 0 if agree else 1


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="number of runs of each variant (default: %(default)s)")
    parser.add_argument("--large", action="store_true", help="a large model on small batches, and hvdtrain in more ways")
    parser.add_argument(
        "--channels", type=int, help=f"width of the model ({CHANNELS}, which is 1.8 M parameters; large: {LARGE}, 20 M)"
    )
    parser.add_argument("--steps", type=int, help="steps of the timed epoch and of the warm-up epoch (20; large: 32)")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (1 2; large: 2)")
    parser.add_argument("--batch", type=int, help="sequences per step, over all ranks (256; large: 16)")
    parser.add_argument("--threads", type=int, help="threads per rank (default: cores divided by ranks)")
    parser.add_argument(
        "--reading",
        choices=["h5py", "memory"],
        default="h5py",
        help="how the hand-written loops read: slices of the open file, or of arrays read at the start (%(default)s)",
    )
    parser.add_argument("--data", type=Path, default=ROOT / "data/g2p/train.hdf", help="HDF file to take sequences from")
    options = parser.parse_args()
    defaults = {"channels": LARGE, "steps": 32, "ranks": [2], "batch": 16} if options.large else {}
    for name, value in ({"channels": CHANNELS, "steps": 20, "ranks": [1, 2], "batch": 256} | defaults).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for ranks in options.ranks:
        if options.batch % ranks:
            parser.error(f"--batch: expected a multiple of {ranks}, the number of ranks, got {options.batch}")
    return options


def prepare(options: argparse.Namespace, folder: Path, ranks: int, threads: int) -> Job:
    """Write the data of an epoch to a file, and the list of batches that hvdtrain will build from it."""
    data = folder / "words.hdf"
    num_sequences = options.steps * options.batch
    if not data.exists():
        source, problems = parse("train", str(options.data), {})
        assert source is not None, problems
        dump(source, data, Selection(end=num_sequences - 1), Peers())
    batch = options.batch // ranks
    settings = read_settings(CONFIGS, hvdtrain_keys(data, folder, batch, options.channels))
    dataset = open_dataset(settings.train)
    assert dataset.num_sequences == num_sequences, f"{options.data} has only {dataset.num_sequences} sequences"
    feeds = [Feed("train", dataset, settings.train.order, settings.batch, rank, ranks) for rank in range(ranks)]
    batches = folder / f"batches-{ranks}.npy"
    numpy.save(batches, [[feed.rank_batches(feed.plan(epoch)) for epoch in range(1, EPOCHS + 1)] for feed in feeds])
    variants = (*(HVDTRAIN if options.large else ["hvdtrain"]), *LOOP_VARIANTS)
    return Job(data, batches, folder, ranks, batch, threads, options.reading, options.channels, variants)


def hvdtrain_keys(data: Path, folder: Path, batch: int, channels: int) -> dict[str, str]:
    """The overrides on hvdtrain's command line, in whatever way it runs."""
    return {
        "channels": str(channels),
        "num_epochs": str(EPOCHS),
        "max_seqs": str(batch),
        "train.files": str(data),
        "model": str(folder / "hvdtrain/model"),
    }


def run_pairs(job: Job, count: int) -> Iterator[dict[str, Result]]:
    """Run every variant `count` times in rotating order and print the rates of each pair."""
    print(f"{'sequences/s':>12} " + " ".join(f"{variant:>14}" for variant in job.variants) + f" {'loss':>10}")
    for pair in range(count):
        turn = pair % len(job.variants)
        results = {variant: run(job, variant) for variant in job.variants[turn:] + job.variants[:turn]}
        rates = " ".join(f"{results[variant].sequences_per_second:14.1f}" for variant in job.variants)
        print(f"{f'pair {pair + 1}':>12} {rates} {results['hvdtrain'].loss:10.6f}", flush=True)
        yield results


def run(job: Job, variant: str) -> Result:
    """Run a variant once."""
    command = ["mpirun", "-np", str(job.ranks), "--bind-to", "none", "--oversubscribe"]
    if variant == "horovod, yield":
        command += ["--mca", "mpi_yield_when_idle", "1"]
    command.append(sys.executable)
    if variant in HVDTRAIN:
        shutil.rmtree(job.folder / "hvdtrain", ignore_errors=True)
        keys = {**HVDTRAIN[variant], **hvdtrain_keys(job.data, job.folder, job.batch, job.channels)}
        overrides = [word for name, value in keys.items() for word in (f"++{name}", value)]
        epochs = reports_in(start([*command, "-m", "hvdtrain", *map(str, CONFIGS), *overrides], job.threads))
        cpu = sum(epoch["cpu"] for epoch in epochs if epoch["epoch"] == EPOCHS)
        return read_scores(job.folder / "hvdtrain/scores.jsonl", cpu)
    loop = LOOPS / ("ddp_loop.py" if variant == "ddp" else "horovod_loop.py")
    arguments = [str(job.data), str(job.batches), "--reading", job.reading, "--channels", str(job.channels)]
    reports = reports_in(start([*command, str(loop), *arguments], job.threads))
    assert len(reports) == job.ranks, f"{variant}: expected a report of each of {job.ranks} ranks, got {reports}"
    slowest = min(report["sequences_per_second"] for report in reports)
    cpu = sum(report["cpu"] for report in reports)
    return Result(slowest * job.ranks, cpu, statistics.mean(report["loss"] for report in reports))


def reports_in(printed: str) -> list[dict[str, float]]:
    """The lines of JSON that the ranks printed."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def start(command: list[str], threads: int) -> str:
    """Run a command and return its output. Exits with the output if the command fails."""
    environment = {name: value for name, value in os.environ.items() if name != "OMPI_MCA_mpi_yield_when_idle"}
    environment |= {"OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def read_scores(path: Path, cpu: float) -> Result:
    """Read the timed epoch from hvdtrain's scores.jsonl."""
    epoch = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    assert epoch["epoch"] == EPOCHS, f"{path}: expected {EPOCHS} epochs, got {epoch['epoch']}"
    return Result(epoch["num_sequences"] / epoch["elapsed"], cpu, epoch["scores"]["train_loss_ctc"])


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def print_table(job: Job, pairs: list[dict[str, Result]]) -> None:
    """Print the ratio of hvdtrain's rate, and of the rates per CPU second, to each of the loops': the median and all values."""
    print(machine())
    for ours in [variant for variant in job.variants if variant in HVDTRAIN]:
        for what in ("", ", CPU"):
            print(f"\n{f'{ours}{what} against':>22}  median  pairs")
            for variant in LOOP_VARIANTS:
                ratios = [ratio(pair[ours], pair[variant], of_cpu=bool(what)) for pair in pairs]
                print(f"{variant:>22}  {statistics.median(ratios):6.3f}  {' '.join(f'{one:.3f}' for one in ratios)}")


def ratio(own: Result, other: Result, of_cpu: bool) -> float:
    """Above 1, the first is faster, or takes less CPU time."""
    return other.cpu / own.cpu if of_cpu else own.sequences_per_second / other.sequences_per_second


def losses_agree(job: Job, pairs: list[dict[str, Result]]) -> bool:
    """Whether all runs that compute the same have the same loss within the tolerance; print the largest difference."""
    losses = {variant: [pair[variant].loss for pair in pairs] for variant in job.variants}
    reference = losses["hvdtrain"][0]
    same = [loss for variant, found in losses.items() if variant not in OTHERWISE for loss in found]
    apart = max(abs(loss - reference) / abs(reference) for loss in same)
    means = ", ".join(f"{variant} {found[-1]:.6f}" for variant, found in losses.items())
    print(
        f"mean loss of the timed epoch: {means}; at most {apart:.1e} apart: {'agree' if apart <= TOLERANCE else 'DO NOT AGREE'}"
    )
    return apart <= TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
