#!/usr/bin/env python3
"""The cost of looking at steps: `OPENBLAS_NUM_THREADS=1 python benchmarks/step_log.py`.

Short steps (a small matrix product) without a log, with a log that writes lines to a file, with one that also records the steps'
numbers in steps.jsonl and for TensorBoard, and both with a bar on a terminal (a pty, which a thread reads), alternately. Then
what a step and a record take by themselves, without the product. Times are CPU time.
"""

from __future__ import annotations

import argparse
import logging
import os
import pty
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy
from measuring import Contestant, machine, table, take_turns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.checkpoint.progress import EpochProgress  # noqa: E402  # found through the line above
from hvdtrain.data.plan.epoch import Plan  # noqa: E402
from hvdtrain.plugins.bars.drawn import DrawnSteps
from hvdtrain.plugins.bars.terminal import Terminal
from hvdtrain.plugins.trackers.receivers import TensorBoard  # noqa: E402
from hvdtrain.report.json_lines import StepLines  # noqa: E402
from hvdtrain.runtime.log import LogKeys, open_log
from hvdtrain.runtime.scores import Scores  # noqa: E402
from hvdtrain.runtime.timer import Timer  # noqa: E402
from hvdtrain.schedule.history import UsedRates  # noqa: E402
from hvdtrain.training.epoch import TrainingEpoch  # noqa: E402
from hvdtrain.training.step_log import ScoreBuffer, StepLog, StepReport  # noqa: E402
from hvdtrain.training.step_numbers import StepNumbers  # noqa: E402

BATCH = 32
"""Sequences in a batch."""


def drain(end: int) -> None:
    """Read the output to a terminal until it is closed."""
    with suppress(OSError):
        while os.read(end, 4096):
            pass


class Constant:
    """A meter with constant scores, in place of a learner's."""

    def drain_ready(self) -> Scores:
        result = Scores()
        result.add("ce", 1.0, 1.0)
        return result

    take_scores = drain_ready

    def peak_memory(self) -> int | None:
        return None

    def step_seconds(self) -> float:
        return 1.0

    def gradient_norm(self) -> float | None:
        return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="steps per round (1000)")
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds (20)")
    options = parser.parse_args()
    print(machine())
    end, inside = pty.openpty()
    os.system(f"stty cols 120 rows 24 < {os.ttyname(inside)}")
    threading.Thread(target=drain, args=(end,), daemon=True).start()
    frames, weights = (numpy.random.default_rng(0).normal(size=(256, 256)).astype(numpy.float32) for _ in range(2))
    meter = Constant()
    lengths = numpy.random.default_rng(0).integers(10, 1000, BATCH * options.steps)
    plan = Plan(numpy.random.default_rng(0).permutation(len(lengths)), numpy.arange(options.steps + 1) * BATCH)

    columns = {"data": lengths, "classes": lengths}
    feed = SimpleNamespace(lengths_in=lambda epoch: columns, sequences_among=len, passes=1)
    clock = SimpleNamespace(elapsed=lambda current: time.perf_counter())

    spent: list[float] = []

    def steps(log: StepLog | None, numbers: StepNumbers | None = None, computes: bool = True) -> float:
        tally, rates, current = ScoreBuffer(meter), UsedRates(), EpochProgress(1, 0)

        def record(report: StepReport, scores: Mapping[str, float]) -> None:
            if numbers is not None:
                began = time.thread_time()
                current.position = report.number
                numbers.step(report, scores)
                if computes:
                    spent.append(time.thread_time() - began)

        if numbers is not None:
            epoch = TrainingEpoch(plan, current, lambda position: 0.0, 0.001, 0.001, 0.0)
            numbers.begin(epoch, feed)  # type: ignore[arg-type]  # of a feed, what is asked for
        if log is not None:
            log.begin(1, None, options.steps, listener=None if numbers is None else record)
        for number in range(1, options.steps + 1):
            if computes:
                frames @ weights
            if log is not None:
                rates.add(0.001)
                log.step(StepReport(number, number / options.steps, 0.001, None, tally))
        if log is not None:
            log.end()  # the record at the end of an epoch would come four times per second here
        return float(options.steps)

    with tempfile.TemporaryDirectory() as folder, os.fdopen(inside, "w") as stream:
        open_log(LogKeys(log=f"{folder}/train.log", log_verbosity=[5, 0]), 0, 1)
        receivers = [StepLines(Path(folder) / "steps.jsonl").step, TensorBoard(Path(folder) / "tensorboard", 0).step]
        numbers = StepNumbers(receivers, Timer(), meter, clock)  # type: ignore[arg-type]  # what is asked for
        contestants: dict[str, Contestant] = {
            "no log": lambda: steps(None),
            "lines in a file, ten per second": lambda: steps(StepLog(0.1)),
            "the same, with steps.jsonl and TensorBoard": lambda: steps(StepLog(0.1), numbers),
            "a bar, and lines every 10 s": lambda: steps(StepLog(10.0, DrawnSteps(Terminal(stream, inside)))),
            "the same, with steps.jsonl and TensorBoard every 10 s": lambda: steps(
                StepLog(10.0, DrawnSteps(Terminal(stream, inside))), numbers
            ),
        }
        table(take_turns(contestants, options.rounds), "steps/s", 1.0, "no log")
        alone: dict[str, Contestant] = {
            "a step without a line": lambda: steps(StepLog(3600.0), computes=False),
            "the same, with receivers of records": lambda: steps(StepLog(3600.0), numbers, computes=False),
            "a step with a line": lambda: steps(StepLog(0.0), computes=False),
            "a step with a line and a record": lambda: steps(StepLog(0.0), numbers, computes=False),
        }
        print("\n| by itself | microseconds |\n|---|---|")
        for name, found in take_turns(alone, options.rounds).items():
            print(f"| {name} | {1e6 / statistics.median(found):.2f} |")
        if spent:
            print(f"| a record between steps with a product ({len(spent)}) | {1e6 * statistics.median(spent):.2f} |")
        open_log(LogKeys(), 0, 1)
        logging.shutdown()


if __name__ == "__main__":
    main()
