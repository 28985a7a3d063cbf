"""Measuring how fast the sequences of a dataset are read in random order, and how much faster a contiguous copy is."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.hdf.writer import HDFWriter
from hvdtrain.data.types import Array

SAMPLE_SEQUENCES, SAMPLE_BYTES = 5000, 128 << 20
"""The maximal size of the copy: more than the caches of a processor hold, which would favour the copy."""

ROUNDS = 4


def measure(dataset: Dataset, seconds: float, indices: Array | None = None) -> dict[str, float]:
    """Read sequences in random order for some seconds; return sequences and megabytes per second.

    Args:
        indices: of the sequences to pick from; None: all.
    """
    generator = numpy.random.default_rng(0)
    began = now = time.perf_counter()
    sequences = copied = 0
    while now - began < seconds:
        picked = generator.integers(dataset.num_sequences if indices is None else len(indices), size=100)
        for index in (picked if indices is None else indices[picked]).tolist():
            for values in dataset.sequence(index).values():
                copied += values.copy().nbytes  # a sequence of a mapped file is a view: copying reads it
            sequences += 1
            now = time.perf_counter()
            if now - began >= seconds:
                break
    return {"sequences_per_second": sequences / (now - began), "megabytes_per_second": copied / 1e6 / (now - began)}


def gain_of_copy(dataset: Dataset, seconds: float) -> tuple[float, int]:
    """How many times as fast a contiguous copy is read, and on how many sequences, spread over the dataset, that was measured.

    The sequences are copied to a temporary file, for at most twice the seconds. Dataset and copy are then read from memory in
    turn, each for half of the seconds. The highest rates are compared, as they are disturbed least by other programs.

    Raises:
        DataError: the copy cannot be written.
    """
    count = dataset.num_sequences
    spread = numpy.unique(numpy.linspace(0, count - 1, SAMPLE_SEQUENCES, dtype=numpy.int64))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "copy.hdf")
        taken: list[int] = []
        copied = 0
        until = time.perf_counter() + 2 * seconds
        with HDFWriter(path) as writer:
            for index in numpy.random.default_rng(1).permutation(spread).tolist():
                arrays = dataset.sequence(index)
                writer.add(f"{index}", arrays)
                taken.append(index)
                copied += sum(values.nbytes for values in arrays.values())
                if copied >= SAMPLE_BYTES or time.perf_counter() > until:
                    break
        copy = open_hdf([path])
        for index in range(len(taken)):  # so that it is in memory, as the original is by now
            copy.sequence(index)
        before, after = [], []
        for _ in range(ROUNDS):
            before.append(measure(dataset, seconds / ROUNDS / 2, numpy.array(taken))["sequences_per_second"])
            after.append(measure(copy, seconds / ROUNDS / 2)["sequences_per_second"])
        copy.close()
    return max(after) / max(before), len(taken)
