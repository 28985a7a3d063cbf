#!/usr/bin/env python3
"""Time and memory to plan an epoch of many sequences, on one rank and on several ranks of a host.

Each run is a separate job: its ranks get the lengths (10 to 2000 frames) from a file that they map, plan an epoch, and compute
the checksum that they compare before an epoch. Several ranks are connected by mpirun. The memory of a job is that of all its
ranks together, less what they had before, and with the plan that they share; it is sampled while they plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
from measuring import machine

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.plugins.hdf_tools.peers import Peers, open_peers
from hvdtrain.training.agreement import plan_together

LIMITS: dict[str, dict[str, Any]] = {
    "batch_size": {"batch_size": 20_000},
    "max_seqs": {"max_seqs": 16},
    "several": {"batch_size": 20_000, "packed_batch_size": 15_000, "max_seqs": 100, "balance_ranks": 8},
    "max_pad_size": {"batch_size": 20_000, "max_pad_size": 5_000},
}
PAUSE = 0.5
"""Seconds before and after planning, in which the memory is sampled, too."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        default=[1_000_000, 10_000_000, 40_000_000],
        help="numbers of sequences (1, 10, 40 million)",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8], help="numbers of ranks (1 8)")
    parser.add_argument("--ordering", default="laplace:.1000", help="seq_ordering (%(default)s)")
    parser.add_argument("--limits", choices=LIMITS, default="batch_size", help="what limits a batch (%(default)s)")
    parser.add_argument("--each", action="store_true", help="every rank plans for itself")
    parser.add_argument("--rank_of", type=Path, help=argparse.SUPPRESS)  # the file with the lengths: this process is a rank
    options = parser.parse_args()
    if options.rank_of is not None:
        rank(options.rank_of, options.ordering, LIMITS[options.limits], options.each)
        return
    print(machine())
    print("| sequences | ranks | seconds | CPU seconds | peak MB | peak, to the first row's | MB afterwards | checksum |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for sequences in options.sequences:
            path = Path(folder) / "lengths.npy"
            numpy.save(path, numpy.random.default_rng(0).integers(10, 2001, sequences, dtype=numpy.int32))
            first = None
            for ranks in options.ranks:
                seconds, computing, peak, after, checksum = job(path, ranks, sys.argv[1:])
                first = first or peak
                memory = f"{peak / 1e6:.0f} | {peak / first:.2f} | {after / 1e6:.0f}"
                print(f"| {sequences:,} | {ranks} | {seconds:.2f} | {computing:.2f} | {memory} | {checksum:08x} |", flush=True)


def job(path: Path, ranks: int, arguments: Sequence[str]) -> tuple[float, float, int, int, int]:
    """Run a job; the seconds of its slowest rank, also of CPU time, its memory in bytes while it plans and afterwards, and the
    ranks' checksum."""
    command = [sys.executable, __file__, *arguments, "--rank_of", str(path)]
    if ranks > 1:
        command = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        processes = json.loads(process.stdout.readline())
        samples: list[int] = []
        done = threading.Event()
        sampler = threading.Thread(target=sample, args=(processes, samples, done))
        sampler.start()
        answer = process.stdout.readline()
        done.set()
        sampler.join()
    if process.returncode or not answer:
        raise SystemExit(f"expected exit status 0 of the ranks, got {process.returncode}")
    seconds, computing, checksums = json.loads(answer)
    if len(set(checksums)) != 1:
        raise SystemExit(f"expected the same plan on all ranks, got the checksums {checksums}")
    return max(seconds), max(computing), max(samples) - samples[0], samples[-1] - samples[0], checksums[0]


def sample(processes: Sequence[int], samples: list[int], done: threading.Event) -> None:
    """Append the memory of some processes, again and again."""
    while not done.is_set():
        samples.append(sum(map(anonymous_memory, processes)) + shared_memory(processes))
        done.wait(0.02)


def anonymous_memory(process: int) -> int:
    """The bytes that belong to a process alone, without those of files."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))


def shared_memory(processes: Sequence[int]) -> int:
    """The bytes of the plans that processes share, each counted once."""
    files = {}
    for link in (link for process in processes for link in Path(f"/proc/{process}/fd").iterdir()):
        with suppress(FileNotFoundError):  # it has just been closed
            if os.readlink(link).startswith("/memfd:hvdtrain"):
                about = link.stat()
                files[about.st_ino] = 512 * about.st_blocks
    return sum(files.values())


class Lengths(Dataset):
    """A dataset that is planned but not read."""

    def __init__(self, path: Path) -> None:
        self.lengths = {"data": numpy.load(path, mmap_mode="r").view(numpy.ndarray)}
        self.streams = {}

    @property
    def num_sequences(self) -> int:
        return len(self.lengths["data"])

    def sequence(self, index: int) -> dict[str, numpy.ndarray]:
        raise NotImplementedError

    def tags(self, indices: Sequence[int]) -> list[str]:
        raise NotImplementedError


class Ranks:
    """MPI's ranks as a communicator, as far as planning needs one."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.rank = self.local_rank = peers.rank
        self.size = self.local_size = peers.size

    def gather(self, value: object, *, name: str) -> list[Any]:
        return self._peers.gather(value, name=name)


def rank(path: Path, ordering: str, limits: dict[str, Any], each: bool) -> None:
    """What a rank of a job does. Rank 0 prints the processes of all, then their seconds and their checksums."""
    comm: Any = Ranks(open_peers())
    feed = Feed("train", Lengths(path), OrderKeys(seq_ordering=ordering), BatchKeys(**limits), comm.rank, comm.size)
    processes = comm.gather(os.getpid(), name="processes")
    if comm.rank == 0:
        print(json.dumps(processes), flush=True)
    time.sleep(PAUSE)
    comm.gather(None, name="begin")
    began, began_computing = time.perf_counter(), time.process_time()
    made = feed.plan(1) if each else plan_together(comm, feed, 1)
    checksum = made.fingerprint
    seconds, computing = time.perf_counter() - began, time.process_time() - began_computing
    found = comm.gather((seconds, computing, checksum), name="end")
    time.sleep(PAUSE)
    if comm.rank == 0:
        print(json.dumps(list(zip(*found, strict=True))), flush=True)
    time.sleep(PAUSE)


if __name__ == "__main__":
    main()
