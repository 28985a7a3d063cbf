#!/usr/bin/env python3
"""The cost of the progress bar on a terminal: `python benchmarks/step_log.py`.

Short steps (a small matrix product) without a log, with a log that writes lines to a file, and with one that draws a bar on a
terminal (a pty, which a thread reads), alternately. Times are CPU time.
"""

from __future__ import annotations

import argparse
import logging
import os
import pty
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import numpy
from measuring import machine, table, take_turns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.runtime.log import LogKeys, Terminal, open_log  # noqa: E402  # found through the line above
from hvdtrain.runtime.scores import Scores  # noqa: E402
from hvdtrain.training.step_log import StepLog, StepReport  # noqa: E402


def drain(end: int) -> None:
    """Read the output to a terminal until it is closed."""
    with suppress(OSError):
        while os.read(end, 4096):
            pass


class Constant:
    """A meter with constant scores, in place of a learner's."""

    def take_arrived(self) -> Scores:
        result = Scores()
        result.add("ce", 1.0, 1.0)
        return result

    def peak_memory(self) -> int | None:
        return None


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

    def steps(log: StepLog | None) -> float:
        if log is not None:
            log.begin(1, None, options.steps)
        for number in range(1, options.steps + 1):
            frames @ weights
            if log is not None:
                log.step(StepReport(number, number / options.steps, 0.001, None, meter))
        if log is not None:
            log.end()
        return float(options.steps)

    with tempfile.TemporaryDirectory() as folder, os.fdopen(inside, "w") as stream:
        open_log(LogKeys(log=f"{folder}/train.log", log_verbosity=[5, 0]), 0, 1)
        contestants = {
            "no log": lambda: steps(None),
            "lines in a file, ten per second": lambda: steps(StepLog(0.1)),
            "a bar, and lines every 10 s": lambda: steps(StepLog(10.0, Terminal(stream, inside))),
        }
        table(take_turns(contestants, options.rounds), "steps/s", 1.0, "no log")
        open_log(LogKeys(), 0, 1)
        logging.shutdown()


if __name__ == "__main__":
    main()
