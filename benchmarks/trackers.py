#!/usr/bin/env python3
"""The cost of trackers and callbacks: `python benchmarks/trackers.py`.

The CPU time that rank 0's process spends on a record of numbers within an epoch, of which a training has one every log_interval
(10 s), for each tracker, in the thread that calls it; and what callbacks take in a step. MLflow writes to its file store, wandb
for its offline mode (its own process, which writes the file, does not count).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

from measuring import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.plugins.trackers.receivers import BackgroundTracker  # noqa: E402
from hvdtrain.plugins.trackers.services import MLflow, RunDescription, Tracker, Wandb  # noqa: E402
from hvdtrain.report.starts import Start  # noqa: E402  # found through the line above
from hvdtrain.report.steps import StepRecord  # noqa: E402
from hvdtrain.training.callbacks import Callbacks  # noqa: E402

INTERVAL = 10.0


class Callback:
    def on_step_end(self, training: Any) -> None:
        pass


def record(step: int) -> StepRecord:
    rates = {"data": 1000.0, "classes": 1000.0}
    return StepRecord(1, step, step, 0.5, 1.0, 0.01, {"ce": 1.0, "fer": 0.5}, 1.0, 100.0, rates, 1 << 30, 0.9, 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=300, help="records of each tracker (300)")
    options = parser.parse_args()
    print(machine())
    print("\n| tracker | ms of a record | of the time, at one every 10 s |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        run = RunDescription("run", Path(folder), None, 0, {"key": 1}, {}, Start([("host", "CPU")], {}, 1, 5))
        trackers: dict[str, Tracker | Wandb | MLflow] = {
            "a class whose methods do nothing": Tracker(),
            "mlflow": MLflow(tracking_uri=f"{folder}/mlruns"),
            "wandb": Wandb(mode="offline"),
        }
        for name, tracker in trackers.items():
            background = BackgroundTracker(name, lambda tracker=tracker: tracker)  # type: ignore[misc]
            background.begin(run)
            background.step(record(0))
            time.sleep(5.0)  # begun, with all it imports
            began = time.process_time()
            for number in range(1, options.records + 1):
                background.step(record(number))
            background.request_end("finished", {})
            background.wait(600.0)
            if background.num_failures:
                sys.exit(f"{name}: {background.num_failures} calls failed")
            seconds = (time.process_time() - began) / options.records
            print(f"| {name} | {1000 * seconds:.2f} | {seconds / INTERVAL:.4%} |", flush=True)
    print("\n| callbacks | microseconds of a step |\n|---|---|")
    for name, callbacks in {"none": Callbacks(), "one, which does nothing": Callbacks([Callback()])}.items():
        each = min(timeit.repeat(lambda: callbacks.call("on_step_end", None), number=100_000, repeat=5)) / 100_000  # noqa: B023
        print(f"| {name} | {1e6 * each:.2f} |")


if __name__ == "__main__":
    main()
