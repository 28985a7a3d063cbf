#!/usr/bin/env python3
"""Short sequences in random order, into padded batches: hvdtrain against RETURNN's HDFDataset.

A sequence has 8 class indices in the mean (key `data`) and 6 more (key `classes`). Rates are thousands of sequences, of both
keys together, a second of the processor; the page cache is warm. RETURNN reads sequence by sequence without batches, and in
batches through the parts of its pipeline for PyTorch, in this process; with its cache off, and with its default cache filled.
hvdtrain also reads the file as if it were several, which it takes for one dataset.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import returnn_reader
from measuring import in_batches, machine, table, take_turns, write_labels

from hvdtrain.data.hdf.dataset import open_hdf


def main() -> None:
    """Make the file, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100_000, help="in the file (100,000)")
    parser.add_argument("--of_returnn", type=int, default=10_000, help="how many of them RETURNN is given a round (10,000)")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a batch (64)")
    parser.add_argument("--rounds", type=int, default=5, help="in turn (5)")
    options = parser.parse_args()
    returnn_reader.check()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        path, part = Path(folder) / "labels.hdf", Path(folder) / "part.hdf"
        write_labels(path, options.sequences)
        write_labels(part, options.of_returnn)
        off = returnn_reader.open_dataset(part)
        filled = returnn_reader.open_dataset(part, returnn_reader.default_cache_bytes())
        contestants: dict[str, Callable[[], float]] = {
            "hvdtrain, batches": in_hvdtrain([path], options.batch, options.sequences),
            "hvdtrain, batches from 4 files": in_hvdtrain([path] * 4, options.batch, options.sequences),
            "hvdtrain, batches from 30 files": in_hvdtrain([path] * 30, options.batch, options.sequences),
            "RETURNN, sequences": epochs(lambda epoch: returnn_reader.sequences(off, epoch)),
            "RETURNN, batches": epochs(lambda epoch: returnn_reader.batches(off, epoch, options.batch), options.batch),
            "RETURNN, sequences, cached": epochs(lambda epoch: returnn_reader.sequences(filled, epoch)),
        }
        table(take_turns(contestants, options.rounds), "thousand sequences/s", 1e3, "hvdtrain, batches")
    print(machine())


def in_hvdtrain(paths: list[Path], size: int, most: int) -> Callable[[], float]:
    """A contestant that reads no more than so many sequences of some files."""
    dataset = open_hdf(paths)
    share = in_batches(dataset.num_sequences, size)[: most // size]
    return lambda: sum(len(batch.indices) for batch in map(dataset.batch, share))


def epochs(read: Callable[[int], Iterable[Any]], size: int = 1) -> Callable[[], float]:
    """A contestant that goes through an epoch after the other, and counts sequences."""
    numbers = iter(range(1, 1000))
    return lambda: size * sum(1 for _ in read(next(numbers)))


if __name__ == "__main__":
    main()
