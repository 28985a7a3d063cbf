"""Shared parts of the data benchmarks: alternating measurements, medians, the state of the machine, test files."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hvdtrain.plugins.hdf_tools.writer import HDFWriter  # noqa: E402  # found through the line above

Contestant = Callable[[], float]
"""Does its work once and returns the amount: bytes or sequences."""


def machine() -> str:
    """The state of the machine, for the head of an output: figures from a busy machine are less reliable."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, load average {os.getloadavg()[0]:.2f} (above 1: other programs are running, too)"


def take_turns(
    contestants: Mapping[str, Contestant], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Measure the rate of each contestant in every round, after a warm-up round.

    The default clock is the CPU time of all threads of this process, which other programs affect little.
    """
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, work in contestants.items():
            began = clock()
            amount = work()
            if number:
                rates[name].append(amount / (clock() - began))
    return rates


def table(rates: Mapping[str, list[float]], unit: str, scale: float, against: str) -> None:
    """Print the median rates, and the median ratio of the contestant `against` to each contestant within a round."""
    print(f"| what | {unit} | {against} relative to it ({len(rates[against])} rounds) |\n|---|---|---|")
    for name, found in rates.items():
        ratios = [own / other for own, other in zip(rates[against], found, strict=True)]
        print(
            f"| {name} | {statistics.median(found) / scale:,.2f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |",
            flush=True,
        )


def write_frames(path: Path, sequences: int, shortest: int, longest: int, features: int = 80) -> None:
    """Write a contiguous file of float32 features: a random walk rounded to three digits, which makes it compressible."""
    generator = numpy.random.default_rng(0)
    with HDFWriter(path) as writer:
        for number in range(sequences):
            steps = generator.normal(scale=0.1, size=(int(generator.integers(shortest, longest + 1)), features))
            frames = numpy.round(numpy.cumsum(steps, axis=0), 3).astype(numpy.float32)
            writer.add(f"seq-{number}", {"data": frames})


def write_labels(path: Path, sequences: int) -> None:
    """Write a contiguous file of class indices, 3 to 13 per sequence in the key `data` and 2 to 10 in `classes`."""
    generator = numpy.random.default_rng(0)
    with HDFWriter(path, dims={"data": 27, "classes": 39}) as writer:
        for number in range(sequences):
            lengths = generator.integers([3, 2], [14, 11])
            writer.add(
                f"seq-{number}",
                {
                    "data": generator.integers(0, 27, lengths[0], dtype=numpy.int8),
                    "classes": generator.integers(0, 39, lengths[1], dtype=numpy.int8),
                },
            )


def in_batches(sequences: int, size: int, seed: int = 1) -> list[numpy.ndarray]:
    """All sequences in random order, in batches of the given size; an incomplete last batch is dropped."""
    if sequences < size:
        raise SystemExit(f"--sequences: expected at least one batch of {size} sequences, got {sequences} (--batch)")
    order = numpy.random.default_rng(seed).permutation(sequences)
    return list(order[: sequences // size * size].reshape(-1, size))
