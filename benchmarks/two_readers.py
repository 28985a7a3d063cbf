#!/usr/bin/env python3
"""Two processes read one file: the rate of each against that of one alone, and what of the file they hold in common.

Alternating, one process reads alone and two read at the same time, for `--seconds` each, in padded batches in random order.
Rates are given by the clock and by the processor's seconds: where fewer than two cores are free, the former tells nothing.
Of the mapped file, /proc/self/smaps tells what each process has touched (Rss), how much of that others map as well (Shared),
and the process's share of it (Pss). Long sequences compete for the memory's bandwidth, short ones for nothing.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import in_batches, machine, write_frames, write_labels

from hvdtrain.data.hdf.dataset import open_hdf


def main() -> None:
    """Make the files, start the readers, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sequences", type=int, default=1000, help="long ones; of the short ones there are a hundred times as many"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of reading (2)")
    parser.add_argument("--rounds", type=int, default=5, help="in turn (5)")
    parser.add_argument("--read", nargs=2, metavar=("FILE", "BATCH"), help=argparse.SUPPRESS)  # what a started process does
    options = parser.parse_args()
    if options.read:
        read(Path(options.read[0]), int(options.read[1]), options.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        long, short = Path(folder) / "long.hdf", Path(folder) / "short.hdf"
        write_frames(long, options.sequences, 300, 800)
        write_labels(short, 100 * options.sequences)
        for what, path, batch in (("long sequences", long, 16), ("short sequences", short, 64)):
            print(f"\n{what}, {path.stat().st_size / 1e6:.0f} MB, {machine()}", flush=True)
            contest(path, batch, options.seconds, options.rounds)


def contest(path: Path, batch: int, seconds: float, rounds: int) -> None:
    """One and two readers in turn."""
    ratios: dict[str, list[float]] = {"clock": [], "processor": []}
    pair: list[dict[str, float]] = []
    for _ in range(rounds):
        alone = started(path, batch, seconds, 1)[0]
        pair = started(path, batch, seconds, 2)
        for clock, found in ratios.items():
            found.append(statistics.mean(reader[clock] for reader in pair) / alone[clock])
    for clock, found in ratios.items():
        spread = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        print(f"each of two, against one alone, by the {clock}: {spread}")
    for number, reader in enumerate(pair):
        print(
            f"reader {number}: of the mapped file {reader['Rss']:.0f} MB touched, {reader['Shared']:.0f} MB shared, "
            f"{reader['Private']:.0f} MB private, {reader['Pss']:.0f} MB its own share"
        )


def started(path: Path, batch: int, seconds: float, number: int) -> list[dict[str, float]]:
    """What so many readers report that begin at the same time."""
    command = [sys.executable, __file__, "--read", str(path), str(batch), "--seconds", str(seconds)]
    readers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(number)]
    for reader in readers:
        assert reader.stdout is not None
        reader.stdout.readline()  # it is ready
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
    lines = [reader.stdout.readline() for reader in readers if reader.stdout is not None]
    for reader in readers:
        reader.communicate("\n")  # both map the file until both have reported
    return [json.loads(line) for line in lines]


def read(path: Path, batch: int, seconds: float) -> None:
    """A reader: warm up, wait for the word, read, report, wait for the end."""
    dataset = open_hdf([path])
    share = in_batches(dataset.num_sequences, batch)
    for _ in map(dataset.batch, share):
        pass
    print("ready", flush=True)
    sys.stdin.readline()
    began, began_processor, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        done += sum(len(one.indices) for one in map(dataset.batch, share[done // batch % len(share) :][:20]))
    rates = {"clock": done / (time.perf_counter() - began), "processor": done / (time.process_time() - began_processor)}
    print(json.dumps(rates | held(path)), flush=True)
    sys.stdin.readline()


def held(path: Path) -> dict[str, float]:
    """MB of a mapped file in this process's memory."""
    totals = dict.fromkeys(("Rss", "Pss", "Shared", "Private"), 0.0)
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside:
            name, value = line.split()[:2]
            kind = name.rstrip(":").split("_")[0]
            if kind in totals:
                totals[kind] += int(value) / 1e3
    return totals


if __name__ == "__main__":
    main()
