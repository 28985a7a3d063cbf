#!/usr/bin/env python3
"""The effect of `cache_size`: compressed files read without a cache and with one (-1), and a contiguous file.

Rates are megabytes of frames per second of CPU time, in padded batches in random order, with a warm page cache. The first epoch
fills the cache and the second one reads from it. The data is a random walk rounded to three digits.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from measuring import in_batches, machine, write_frames

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.cache.budget import Budget
from hvdtrain.plugins.hdf_tools.check import repack

EPOCHS = 2


def main() -> None:
    """Create the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=400, help="number of sequences, of 550 frames on average (400: 70 MB)")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch (16)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    parser.add_argument(
        "--compression", nargs="+", default=["gzip", "zstd", "lz4"], help="compressions to compare (gzip zstd lz4)"
    )
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        files = {"contiguous": Path(folder) / "contiguous"}
        write_frames(files["contiguous"], options.sequences, 300, 800)
        for compression in options.compression:
            files[compression] = Path(folder) / compression
            repack(files["contiguous"], files[compression], compression)
        found: dict[tuple[str, str], list[list[float]]] = {}
        for _ in range(options.rounds):
            for name, path in files.items():
                found.setdefault((name, "0"), []).append(epochs(open_hdf([path]), options.batch))
                if name != "contiguous":
                    found.setdefault((name, "-1"), []).append(epochs(Budget(None).keep(open_hdf([path])), options.batch))
        print("| layout | file, MB | cache_size | MB/s in epoch 1 | in epoch 2 | epoch 2 relative to cache_size 0 |")
        print("|---|---|---|---|---|---|")
        for (name, size), rows in found.items():
            first, second = (statistics.median(row[epoch] for row in rows) for epoch in range(EPOCHS))
            gains = [row[1] / without[1] for row, without in zip(rows, found[name, "0"], strict=True)]
            megabytes = files[name].stat().st_size / 1e6
            print(f"| {name} | {megabytes:.0f} | {size} | {first:,.0f} | {second:,.0f} | {statistics.median(gains):.1f} times |")
    print(machine())


def epochs(dataset: Dataset, batch: int) -> list[float]:
    """MB per second of CPU time, by epoch."""
    frame = dataset.sequence(0)["data"][0].nbytes
    rates = []
    for epoch in range(EPOCHS):
        share = in_batches(dataset.num_sequences, batch, seed=epoch)
        began = time.process_time()
        frames = sum(int(one.data["data"].seq_lens.sum()) for one in map(dataset.batch, share))
        rates.append(frame * frames / 1e6 / (time.process_time() - began))
    dataset.close()
    return rates


if __name__ == "__main__":
    main()
