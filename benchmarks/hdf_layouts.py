#!/usr/bin/env python3
"""Reading speed of a file in random order, in each layout that hvdtrain writes and in those it warns about.

Rates are per second of CPU time, which other programs affect little, with a warm page cache. The data is a random walk of 80
features rounded to 3 digits; how well files compress depends on the data.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.hdf_tools.check import repack
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

FEATURES = 80


def write(path: Path, sequences: int) -> None:
    generator = numpy.random.default_rng(0)
    with HDFWriter(path) as writer:
        for number in range(sequences):
            length = int(generator.integers(100, 900))
            steps = generator.normal(scale=0.1, size=(length, FEATURES))
            writer.add(f"seq-{number}", {"data": numpy.round(numpy.cumsum(steps, axis=0), 3).astype(numpy.float32)})


def store(source: Path, path: Path, **options: Any) -> None:
    """Copy a file and store its frames in another layout."""
    path.write_bytes(source.read_bytes())
    with h5py.File(path, "r+") as file:
        frames = file["inputs"][:]
        del file["inputs"]
        if isinstance(options.get("chunks"), tuple):
            length, width = options["chunks"]
            options["chunks"] = (min(length, len(frames)), width)
        file.create_dataset("inputs", data=frames, **options)


def rate(path: Path, seconds: float) -> float:
    """Megabytes per second of CPU time, for copying sequences in random order."""
    dataset = open_hdf([path])
    order = numpy.random.default_rng(0).permutation(dataset.num_sequences).tolist()
    for index in order[:50]:
        dataset.sequence(index)
    copied, began, done = 0, time.process_time(), 0
    while time.process_time() - began < seconds:
        copied += dataset.sequence(order[done % len(order)])["data"].copy().nbytes
        done += 1
    return copied / 1e6 / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=300, help="number of sequences, of 500 frames on average (300: 48 MB)")
    parser.add_argument("--seconds", type=float, default=0.5, help="CPU seconds of reading per layout (0.5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        contiguous = Path(folder) / "contiguous"
        write(contiguous, options.sequences)
        layouts = {"contiguous": contiguous}
        for compression in ("lz4", "blosc2", "zstd", "lzf", "gzip"):
            layouts[compression] = Path(folder) / compression
            repack(contiguous, layouts[compression], compression)
        for name, chunks in {
            "chunks (270, 10)": (270, 10),
            "h5py's own chunks": True,
            "one chunk of 8 MiB": (26214, FEATURES),
        }.items():
            layouts[name] = Path(folder) / name
            store(contiguous, layouts[name], chunks=chunks)
        print("| layout | MB | MB/s in random order |\n|---|---|---|")
        for name, path in layouts.items():
            print(f"| {name} | {path.stat().st_size / 1e6:.0f} | {rate(path, options.seconds):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
