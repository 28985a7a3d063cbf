#!/usr/bin/env python3
"""The effect of `balance_ranks`, computed from plans without training.

A step takes as long as its largest batch, so the padded frames of the largest batch of every step, summed over an epoch, stand
for its time. The lower bound is the number of padded frames of all batches, divided by the number of ranks.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.data.plan.batch_keys import BatchKeys  # noqa: E402
from hvdtrain.data.plan.epoch import Plan, plan  # noqa: E402
from hvdtrain.data.plan.order_keys import OrderKeys  # noqa: E402  # found through the line above


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=100_000, help="sequences in the corpus (default: %(default)s)")
    parser.add_argument("--shortest", type=int, default=10, help="frames of the shortest sequence (%(default)s)")
    parser.add_argument("--longest", type=int, default=2000, help="frames of the longest sequence (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (2 4 8)")
    parser.add_argument("--max_seqs", type=int, default=16, help="sequences per batch (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=20_000, help="padded frames per batch (%(default)s)")
    options = parser.parse_args()

    frames = numpy.random.default_rng(1).integers(options.shortest, options.longest + 1, options.sequences)
    lengths = {"data": frames.astype(numpy.int32)}
    print(f"{options.sequences} sequences of {options.shortest} to {options.longest} frames")
    print("largest batches of all steps in millions of padded frames; in brackets: above the lower bound")
    print(f"{'order':<24} {'batches':<18} {'ranks':>5} {'not balanced':>20} {'balance_ranks':>20} {'saved':>7}")
    for ordering in ("random", "laplace:.1000", "sort_bin_shuffle_x2:.64", "sorted"):
        for name, limits in (
            (f"max_seqs {options.max_seqs}", {"max_seqs": options.max_seqs}),
            (f"batch_size {options.batch_size}", {"batch_size": options.batch_size}),
        ):
            for ranks, plain, balanced, least in rows(lengths, ordering, limits, options.ranks):
                print(
                    f"{ordering:<24} {name:<18} {ranks:>5} {shown(plain, least):>20} {shown(balanced, least):>20} "
                    f"{1 - balanced / plain:>7.1%}"
                )
    return 0


def rows(
    lengths: dict[str, numpy.ndarray], ordering: str, limits: dict[str, int], sizes: list[int]
) -> Iterator[tuple[int, int, int, float]]:
    """Number of ranks, padded frames of the steps' largest batches without and with balancing, and their lower bound."""
    order_keys = OrderKeys(seq_ordering=ordering)
    plain = plan(lengths, order_keys, BatchKeys(**limits), 1)
    for size in sizes:
        balanced = plan(lengths, order_keys, BatchKeys(balance_ranks=size, **limits), 1)
        least = plain.padded(lengths)["data"].sum() / size
        yield size, cost(plain, lengths, size), cost(balanced, lengths, size), least


def cost(made: Plan, lengths: dict[str, numpy.ndarray], size: int) -> int:
    """The padded frames of the largest batch of every step, summed over the epoch."""
    frames = made.padded(lengths)["data"]
    return int(numpy.maximum.reduceat(frames, numpy.arange(0, len(frames), size)).sum())


def shown(frames: int, least: float) -> str:
    return f"{frames / 1e6:.2f} ({frames / least - 1:+.1%})"


if __name__ == "__main__":
    sys.exit(main())
