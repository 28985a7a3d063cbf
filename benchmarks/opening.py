#!/usr/bin/env python3
"""Time and memory to open a file with many sequences, each time in a new process; and the time to identify the data.

What identifies the data of a training is stored in its checkpoints. It is computed once per start, on rank 0.

The files have `/seqLengths`, `/seqTags` (20 bytes) and frames that are never written, as opening does not read them. Each file is
opened `--rounds` times; the first time, the lengths may be read from the disk.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy
from measuring import machine

OPEN = """
import json, resource, sys, time
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.dataset import DatasetPart
from hvdtrain.plugins.same_data.identity import identify

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

before, began, began_processor = resident(), time.perf_counter(), time.process_time()
dataset = open_hdf([sys.argv[1]])
seconds, processor = time.perf_counter() - began, time.process_time() - began_processor
grown = (resident() - before) / dataset.num_sequences / len(dataset.streams)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
began = time.perf_counter()
identify([DatasetPart("train", dataset, (sys.argv[1],))])
print(json.dumps([seconds, processor, grown, peak, time.perf_counter() - began]))
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[1_000_000, 40_000_000], help="numbers of sequences (1 million, 40 million)"
    )
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 2], help="numbers of data keys (1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="number of times that each file is opened (5)")
    options = parser.parse_args()
    print(machine())
    print(
        "| sequences | keys | seconds: first time | median | CPU seconds | bytes per sequence and key | peak MB | "
        "seconds to identify: first time | median |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for sequences in options.sequences:
            for keys in options.keys:
                path = Path(folder) / "many.hdf"
                write(path, sequences, keys)
                found = [opened(path) for _ in range(options.rounds)]
                seconds, processor, identified = [row[0] for row in found], [row[1] for row in found], [row[4] for row in found]
                print(
                    f"| {sequences:,} | {keys} | {seconds[0]:.3f} | {statistics.median(seconds):.3f} | "
                    f"{statistics.median(processor):.3f} | {found[-1][2]:.1f} | {max(row[3] for row in found):.0f} | "
                    f"{identified[0]:.3f} | {statistics.median(identified):.3f} |",
                    flush=True,
                )
                path.unlink()


def write(path: Path, sequences: int, keys: int) -> None:
    """Write a file with the index of `sequences` sequences."""
    lengths = numpy.random.default_rng(0).integers(1, 16, (sequences, keys), dtype=numpy.int32)
    names = ["inputs", *(f"targets/data/key{number}" for number in range(1, keys))]
    with h5py.File(path, "w") as file:
        for group in ("targets/data", "targets/labels"):
            file.create_group(group)
        file.create_group("targets/size").attrs.update({f"key{number}": [27, 1] for number in range(1, keys)})
        file.attrs["inputPattSize"] = 27
        file["seqLengths"] = lengths
        reserve(file, "seqTags", sequences, "S20")
        for name, total in zip(names, lengths.sum(axis=0, dtype=numpy.int64), strict=True):
            reserve(file, name, total, numpy.int8)


def reserve(file: h5py.File, name: str, size: int, kind: Any) -> None:
    """Make room for a dataset in the file, without writing anything."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    stored = h5py.h5t.py_create(numpy.dtype(kind), logical=True)
    h5py.h5d.create(file.id, name.encode(), stored, h5py.h5s.create_simple((int(size),)), layout)


def opened(path: Path) -> list[float]:
    """Wall time and CPU time in seconds, memory growth in bytes per sequence and key, peak memory in MB, and the seconds in which
    the data was identified."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", OPEN, str(path)], cwd=root, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
