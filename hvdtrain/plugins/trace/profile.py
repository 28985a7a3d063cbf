"""A profile of some steps, for Perfetto."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from hvdtrain.comm.base import Communicator
from hvdtrain.data.types import Array
from hvdtrain.learner.base import Profiler
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.plugins.trace import TraceKeys
from hvdtrain.runtime import log
from hvdtrain.runtime.timer import Timer
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session, StepRecorder

Timeline = Callable[[bool], None]
"""Starts Horovod's timeline, or stops it."""


@runtime_checkable
class WithTimeline(Protocol):
    """A communicator that writes when each collective ran."""

    def start_timeline(self, file: Path) -> None: ...

    def stop_timeline(self) -> None: ...


@contextmanager
def profile_steps(settings: Settings, session: Session) -> Iterator[StepRecorder | None]:
    """Profile some steps, if the config asks for it."""
    number = settings.of(TraceKeys).profile_steps
    if number is None:
        yield None
        return
    comm = session.comm
    folder = settings.records / "profile"
    on_gpu = session.learner.device_name != "CPU"
    profile = Profile(
        RankProfiler(FRAMEWORKS[settings.run.backend].profiler(on_gpu), comm.rank, comm.size),
        session.timer,
        folder / f"rank-{comm.rank}-of-{comm.size}.json.gz",
        number,
        partial(switch_timeline, comm, folder / "horovod.json") if settings.reduce.horovod_timeline is None else lambda _: None,
    )
    try:
        yield profile
    finally:
        profile.stop()


def switch_timeline(comm: Communicator, file: Path, on: bool) -> None:
    """Start or stop the timeline of the transport, if it has one, as Horovod does."""
    if isinstance(comm, WithTimeline) and comm.rank == 0:
        if on:
            comm.start_timeline(file)
        else:
            comm.stop_timeline()


PROFILED_AFTER = 5
"""The number of steps before the profile: the first ones reserve memory and trace graphs."""


class Profile:
    """Profiles some steps of a rank. If that fails, it logs a warning, and training continues.

    Args:
        profiler: the framework's profiler.
        timer: its spans become ranges of the trace: data wait, compute, communication and so on.
        file: the trace to write.
        num_steps: how many steps to profile, of those in which this rank has a batch.
        timeline: starts and stops Horovod's timeline together with the profiler.
    """

    def __init__(self, profiler: Profiler, timer: Timer, file: Path, num_steps: int, timeline: Timeline) -> None:
        self._profiler = profiler
        self._timer = timer
        self._file = file
        self._num_steps = num_steps
        self._timeline = timeline
        self._seen = 0
        self._is_running = False

    def __call__(self, epoch: int, step: int, indices: Array) -> None:
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
