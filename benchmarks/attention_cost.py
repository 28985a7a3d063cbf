#!/usr/bin/env python3
"""The idle share of ranks that train an attention model, with batches limited by frames and by `batch_cost`.

Every batch is computed once, forward and backward, on one core, and the CPU seconds that this takes are distributed to ranks as
a training does: in a step, every rank has a batch, and those that are done earlier wait for the last one. CPU seconds are
measured, not wall time, so that other programs on the machine matter little.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.data.plan.batch_keys import BatchKeys  # noqa: E402
from hvdtrain.data.plan.bounds import group_by_cost  # noqa: E402
from hvdtrain.data.plan.epoch import Plan, plan  # noqa: E402
from hvdtrain.data.plan.order_keys import OrderKeys  # noqa: E402  # found through the line above


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=400, help="sequences in the corpus (default: %(default)s)")
    parser.add_argument("--shortest", type=int, default=20, help="frames of the shortest sequence (%(default)s)")
    parser.add_argument("--longest", type=int, default=1200, help="frames of the longest sequence (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=9600, help="padded frames per batch (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="features of the model (%(default)s)")
    parser.add_argument("--at", type=float, default=None, help="frames at which the cost of a frame doubles; default: fitted")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (2 4 8)")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(options.width, 4, 2 * options.width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    frames = numpy.random.default_rng(1).integers(options.shortest, options.longest + 1, options.sequences)
    lengths = {"data": frames.astype(numpy.int32)}
    order_keys = OrderKeys(seq_ordering="sort_bin_shuffle_x2:.64")
    by_frames = plan(lengths, order_keys, BatchKeys(batch_size=options.batch_size), 1)
    run(model, 4, options.longest)  # not measured: PyTorch initializes itself
    plain = measure_batches(model, by_frames, frames)
    at = fitted_doubling(by_frames, lengths, plain) if options.at is None else options.at
    by_cost = matching_plan(lengths, order_keys, at, by_frames.num_batches)
    even = measure_batches(model, by_cost, frames)
    print(f"{options.sequences} sequences of {options.shortest} to {options.longest} frames; the cost doubles at {at:.0f}")
    print(
        f"{'ranks':>5} {'batch_size in frames':>22} {'batch_cost':>12} {'and balance_ranks':>18}   idle share of the CPU seconds"
    )
    for ranks in options.ranks:
        balanced = even[group_by_cost(by_cost.padded({"cost": cost_of(frames, at)})["cost"], ranks, numpy.random.RandomState(1))]
        columns = [idle_share(seconds, ranks) for seconds in (plain, even, balanced)]
        print(f"{ranks:>5} {columns[0]:>22.1%} {columns[1]:>12.1%} {columns[2]:>18.1%}")
    seconds = f"{plain.sum():.1f} in {by_frames.num_batches} batches, {even.sum():.1f} in {by_cost.num_batches}"
    print(f"CPU seconds of an epoch: {seconds}")
    return 0


def measure_batches(model: nn.Module, made: Plan, frames: numpy.ndarray) -> numpy.ndarray:
    """The CPU seconds of every batch of a plan."""
    return numpy.array([run(model, len(batch), int(frames[batch].max())) for batch in map(made.batch, range(made.num_batches))])


def fitted_doubling(made: Plan, lengths: dict[str, numpy.ndarray], seconds: numpy.ndarray) -> float:
    """The number of frames at which a frame costs twice as much as in a short sequence: seconds = a * (n + n * n / at)."""
    padded, longest = made.padded(lengths)["data"], made.longest(lengths)["data"]
    terms = numpy.stack([padded, padded * longest], axis=1) / seconds[:, None]  # relative errors count alike
    (linear, quadratic), *_ = numpy.linalg.lstsq(terms, numpy.ones(len(terms)), rcond=None)
    return float(linear / quadratic)


def cost_of(frames: numpy.ndarray, at: float) -> numpy.ndarray:
    return numpy.rint(frames + frames * frames / at).astype(numpy.int64)


def matching_plan(lengths: dict[str, numpy.ndarray], order_keys: OrderKeys, at: float, num_batches: int) -> Plan:
    """A plan by cost with about this number of batches."""
    low, high = 1, 2**30
    while low < high:
        middle = (low + high) // 2
        keys = BatchKeys(batch_size=middle, batch_cost={"class": "quadratic", "at": at})
        low, high = (middle + 1, high) if plan(lengths, order_keys, keys, 1).num_batches > num_batches else (low, middle)
    return plan(lengths, order_keys, BatchKeys(batch_size=low, batch_cost={"class": "quadratic", "at": at}), 1)


def run(model: nn.Module, count: int, length: int) -> float:
    """The CPU seconds of a step with a batch of this shape."""
    batch = torch.randn(count, length, model.layers[0].self_attn.embed_dim)  # type: ignore[union-attr, index]
    began = time.process_time()
    model(batch).square().sum().backward()
    return time.process_time() - began


def idle_share(seconds: numpy.ndarray, ranks: int) -> float:
    """The share of the ranks' time in which they wait for the last one, over all complete steps."""
    steps = seconds[: len(seconds) // ranks * ranks].reshape(-1, ranks)
    return float(1 - steps.sum() / (ranks * steps.max(axis=1).sum()))


if __name__ == "__main__":
    sys.exit(main())
