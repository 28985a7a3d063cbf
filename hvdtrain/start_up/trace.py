"""Recording and profiling the steps of a training, if the config asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from hvdtrain.comm.base import Communicator, on_rank_zero
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session
from hvdtrain.training.trace import Profile, RankProfiler, StepRecorder, Trace, TraceKeys, num_runs, record_nothing


@runtime_checkable
class WithTimeline(Protocol):
    """A communicator that writes when each collective ran."""

    def start_timeline(self, file: Path) -> None: ...

    def stop_timeline(self) -> None: ...


def open_trace(session: Session, keys: TraceKeys) -> StepRecorder:
    """Collective. Open the trace of the sequences that each step trains on."""
    if keys.trace_sequences is None:
        return record_nothing
    prefix = Path(keys.trace_sequences)
    run = on_rank_zero(session.comm, lambda: num_runs(prefix), name="trace")
    return Trace(prefix, run, session.comm.rank, session.progress.step)


@contextmanager
def profile_steps(settings: Settings, session: Session, note: StepRecorder) -> Iterator[StepRecorder]:
    """Profile some steps, if the config asks for it."""
    number = settings.trace.profile_steps
    if number is None:
        yield note
        return
    comm, folder = session.comm, settings.records / "profile"
    on_gpu = session.learner.device_name != "CPU"
    profile = Profile(
        note,
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
