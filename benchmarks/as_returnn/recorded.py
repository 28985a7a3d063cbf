"""What the configs of benchmarks/as_returnn share: a record of the time and the frames of every epoch.

The config itself writes it, so neither program is asked what it does. The time is that from the begin of an epoch's first step to
the end of its last one, with the waiting for data, without start-up and evaluation. For a network of TensorFlow, which has no
steps of a config, it is that of the calls of sessions, after the first ones.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

FOLDER = os.environ["AS_RETURNN_FOLDER"]
"""Where the data is, and where checkpoints and the record go."""
EPOCHS = int(os.environ.get("AS_RETURNN_EPOCHS", "2"))
BATCH_SIZE = int(os.environ["AS_RETURNN_BATCH_SIZE"])
"""Frames in the batch of a rank."""
RANK = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
FEATURES, CLASSES = 40, 64


class Record:
    """Times the training part of epochs: `step` begins each step, `epoch_end` is the hook of the config."""

    def __init__(self) -> None:
        self._begin: tuple[float, ...] | None = None  # the clocks at the epoch's first step
        self._frames = self._steps = 0

    def step(self, frames: int, training: bool) -> None:
        """Note that a step begins. frames: those of its batch without padding."""
        if training:
            if self._begin is None:
                self._begin = time.monotonic(), time.thread_time(), cpu_seconds()
            self._frames += frames
            self._steps += 1

    def epoch_end(self, *, epoch: int, dataset_name: str, **_: object) -> None:
        if dataset_name != "train" or self._begin is None:
            return
        begin, thread, cpu = self._begin
        line = {
            "epoch": epoch,
            "begin": begin,
            "end": time.monotonic(),
            "thread": time.thread_time() - thread,
            "cpu": cpu_seconds() - cpu,
            "frames": self._frames,
            "steps": self._steps,
        }
        with open(Path(FOLDER) / f"record.{RANK}", "a") as file:
            file.write(json.dumps(line) + "\n")
        self._begin, self._frames, self._steps = None, 0, 0


WARM_UP = 10
"""The number of calls of a session that are not measured."""


def record_sessions() -> None:
    """Have a line written for each training step of TensorFlow's sessions: each call that is fed the lengths of sequences."""
    import tensorflow as tf

    original = tf.compat.v1.Session.run
    file = open(Path(FOLDER) / f"record.{RANK}", "a")  # noqa: SIM115  open until the process ends
    calls = itertools.count()

    def run(session: Any, fetches: Any, feed_dict: Any = None, **more: Any) -> Any:
        sizes = [
            value for place, value in (feed_dict or {}).items() if getattr(place, "name", place).endswith("data_dim0_size:0")
        ]
        begin = time.monotonic(), time.thread_time(), time.process_time()
        fetched = original(session, fetches, feed_dict, **more)
        if sizes and next(calls) >= WARM_UP:
            ends = time.monotonic(), time.thread_time(), time.process_time()
            print(json.dumps([*begin, *ends, int(sizes[0].sum())]), file=file, flush=True)
        return fetched

    tf.compat.v1.Session.run = run


def cpu_seconds() -> float:
    """CPU seconds of this process with all of its threads, and of the processes that it started, which read data."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == os.getpid():
            ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")
