"""A record of the sequences that each step trains on, to prove that a stopped training neither loses nor repeats any; and a
profile of some steps."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.config.keys import Section, key, positive
from hvdtrain.runtime import log

if TYPE_CHECKING:
    from hvdtrain.data.types import Array
    from hvdtrain.learner.base import Profiler
    from hvdtrain.runtime.timer import Timer

StepRecorder = Callable[[int, int, "Array"], None]
"""Called before a step with the epoch, the number of earlier steps of the training, and the indices of this rank's sequences."""


Timeline = Callable[[bool], None]
"""Starts Horovod's timeline, or stops it."""


@dataclass(frozen=True, kw_only=True)
class TraceKeys(Section):
    """Finding mistakes."""

    trace_sequences: str | None = key(
        None,
        "record which sequences every step trains on: a prefix for the names of the files, one per rank and start "
        "(docs/resuming.md)",
    )
    profile_steps: int | None = key(
        None,
        "profile N steps of every rank, after the first few, with the framework's profiler, and write traces for Perfetto into "
        "profile/ next to the model, with Horovod's timeline (docs/performance.md)",
        positive,
    )


def record_nothing(epoch: int, step: int, indices: Array) -> None:
    """Record nothing."""


class Trace:
    """The file of one rank and start: a line of JSON for every step, written before the step.

    Args:
        run: the number of this start, from 0.
        first_step: the number of steps of the training before this start.
    """

    def __init__(self, prefix: Path, run: int, rank: int, first_step: int) -> None:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._file = _path(prefix, run, rank).open("w", encoding="utf-8", buffering=1)
        self._file.write(json.dumps({"first_step": first_step}) + "\n")

    def __call__(self, epoch: int, step: int, indices: Array) -> None:
        self._file.write(json.dumps({"epoch": epoch, "step": step, "indices": indices.tolist()}) + "\n")


def num_runs(prefix: Path) -> int:
    """The number of starts that have files."""
    return 1 + max((run for run, _ in _files(prefix)), default=-1)


def has_begun(prefix: Path, run: int, size: int) -> bool:
    """Whether all ranks have begun a step of this start (from 0) or of a later one."""
    return any(
        all(path.exists() and len(path.read_text(encoding="utf-8").splitlines()) > 1 for path in paths)
        for later in range(run, num_runs(prefix))
        for paths in [[_path(prefix, later, rank) for rank in range(size)]]
    )


def trained_on(prefix: Path) -> dict[int, Counter[int]]:
    """By epoch, how often all starts and ranks together have trained the model on each sequence.

    Steps after the checkpoint from which a later start resumed were lost and do not count.
    """
    lines: dict[int, list[dict[str, object]]] = {}
    first_steps: dict[int, int] = {}
    for run, path in _files(prefix):
        for text in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):  # half a line, if the process was killed
                line = json.loads(text)
                if "first_step" in line:
                    first_steps[run] = line["first_step"]
                else:
                    lines.setdefault(run, []).append(line)
    counted: dict[int, Counter[int]] = {}
    for run, steps in lines.items():
        lost_from = min((step for later, step in first_steps.items() if later > run), default=float("inf"))
        for line in steps:
            if line["step"] < lost_from:  # type: ignore[operator]  # a number
                counted.setdefault(line["epoch"], Counter()).update(line["indices"])  # type: ignore[arg-type, call-overload]
    return counted


PROFILED_AFTER = 5
"""The number of steps before the profile: the first ones reserve memory and trace graphs."""


class Profile:
    """Profiles some steps of a rank. If that fails, it logs a warning, and training continues.

    Args:
        inner: also called for every step.
        profiler: the framework's profiler.
        timer: its spans become ranges of the trace: data wait, compute, communication and so on.
        file: the trace to write.
        num_steps: how many steps to profile, of those in which this rank has a batch.
        timeline: starts and stops Horovod's timeline together with the profiler.
    """

    def __init__(
        self, inner: StepRecorder, profiler: Profiler, timer: Timer, file: Path, num_steps: int, timeline: Timeline
    ) -> None:
        self._inner = inner
        self._profiler = profiler
        self._timer = timer
        self._file = file
        self._num_steps = num_steps
        self._timeline = timeline
        self._seen = 0
        self._is_running = False

    def __call__(self, epoch: int, step: int, indices: Array) -> None:
        self._inner(epoch, step, indices)
        self._seen += 1
        if self._seen == PROFILED_AFTER + 1:
            self._try(self._start)
        elif self._seen == PROFILED_AFTER + self._num_steps + 1:
            self.stop()

    def stop(self) -> None:
        """Write the trace if the profiler is running: after the profiled steps, or at the end of a shorter training."""
        if self._is_running:
            self._is_running = False
            self._try(self._write)

    def _start(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._timeline(True)
        self._profiler.start()
        self._timer.ranges = lambda name: self._profiler.range(f"hvdtrain: {name}")
        self._is_running = True

    def _write(self) -> None:
        self._timer.ranges = None
        self._profiler.stop(self._file)
        self._timeline(False)
        log.info(
            f"profile: {min(self._seen - PROFILED_AFTER, self._num_steps)} steps in {self._file} (open it in https://ui.perfetto.dev)",
        )

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            log.warning(f"profile_steps: {self._file} was not written: {error}")


class RankProfiler:
    """A profiler whose traces name their rank, so that the traces of several ranks can be opened together.

    Processes are named after their rank, and their ids differ from those of all other ranks on any host or GPU.
    """

    def __init__(self, inner: Profiler, rank: int, size: int) -> None:
        self._inner = inner
        self._rank = rank
        self._name = f"rank {rank} of {size}"
        self.start = inner.start
        self.range = inner.range

    def stop(self, file: Path) -> None:
        self._inner.stop(file)
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            trace = json.load(stream)
        for event in trace["traceEvents"]:
            if event.get("ph") == "M" and event.get("name") == "process_name":
                event["args"]["name"] = f"{self._name}: {event['args']['name']}"
            if isinstance(event.get("pid"), int):
                event["pid"] += self._rank * MAX_PID  # ranks on different hosts may have the same process id
        with gzip.open(file, "wt", encoding="utf-8", compresslevel=4) as stream:
            json.dump(trace, stream)


MAX_PID = 1 << 22
"""Linux's process ids are below this."""


def _path(prefix: Path, run: int, rank: int) -> Path:
    return prefix.with_name(f"{prefix.name}.run-{run}.rank-{rank}.jsonl")


def _files(prefix: Path) -> list[tuple[int, Path]]:
    pattern = re.compile(rf"{re.escape(prefix.name)}\.run-(\d+)\.rank-\d+\.jsonl")
    paths = prefix.parent.iterdir() if prefix.parent.is_dir() else []
    return [(int(match[1]), path) for path in paths if (match := pattern.fullmatch(path.name))]
