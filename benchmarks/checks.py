"""The cost of comparing every batch with the dataset, the plan and extern_data, relative to reading it and to a training step.

Prints the CPU time of one batch: reading it, comparing it (in the thread that reads ahead), counting it (between two steps), and
a step of a recurrent network on it with PyTorch on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from measuring import machine

from hvdtrain.data.dataset import DatasetPart
from hvdtrain.data.expected import BatchCheck, expected_of
from hvdtrain.data.feed import Feed
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.plan.epoch import BatchKeys
from hvdtrain.data.plan.order import OrderKeys
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.training.account import Account

CLASSES = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32, help="of a batch (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=500, help="of the longest sequence (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the network (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = numpy.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.hdf")
        with HDFWriter(path, labels={"classes": [str(label) for label in range(CLASSES)]}) as writer:
            for number in range(4 * options.sequences):
                frames = int(generator.integers(options.frames // 2, options.frames + 1))
                data = generator.normal(size=(frames, 80)).astype(numpy.float32)
                writer.add(f"seq-{number}", {"data": data, "classes": generator.integers(0, CLASSES, frames).astype(numpy.int32)})
        dataset = open_hdf([str(path)])
        expected, _ = expected_of({"data": {"dim": 80}, "classes": {"dim": CLASSES, "sparse": True}})
        feed = Feed("train", dataset, OrderKeys(), BatchKeys(max_seqs=options.sequences), 0, 1)
        plan = feed.plan(1)
        check = BatchCheck("train", dataset, dataset.lengths, [DatasetPart("train", dataset, (str(path),))], expected, True)
        account, indices = Account(feed, plan), plan.batch(0)
        batch = dataset.batch(indices)
        lstm, output = torch.nn.LSTM(80, options.width, 2, batch_first=True), torch.nn.Linear(options.width, CLASSES)
        inputs = torch.from_numpy(batch.data["data"].values)
        targets = torch.from_numpy(batch.data["classes"].values).long()

        def step() -> None:
            scores = output(lstm(inputs)[0])
            torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()

        seconds = {
            "reading": median(lambda: dataset.batch(indices), options.rounds),
            "comparing": median(lambda: check(batch, indices), options.rounds),
            "counting": median(lambda: account.add(indices), options.rounds),
            "a step": median(step, max(1, options.rounds // 5)),
        }
    print(machine())
    shape = "x".join(map(str, batch.data["data"].values.shape))
    print(f"| a batch of {shape} | microseconds | of a step |\n|---|---|---|")
    for name, one in seconds.items():
        print(f"| {name} | {1e6 * one:,.0f} | {one / seconds['a step']:.3%} |")


def median(work: Callable[[], object], rounds: int) -> float:
    """The CPU seconds of this process that work takes, after a first time."""
    work()
    found = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return statistics.median(found)


if __name__ == "__main__":
    main()
