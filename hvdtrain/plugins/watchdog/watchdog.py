"""The watchdog ends a job that makes no progress: neither MPI nor Horovod's Gloo detects a rank that hangs or is stopped."""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType

from hvdtrain.comm.launchers import Launcher
from hvdtrain.errors import HvdtrainError
from hvdtrain.plugins.watchdog.diagnosis import Diagnosis, Heartbeat, has_waited_long
from hvdtrain.plugins.watchdog.hanging import STACK_SIGNAL, describe, kill, request_stacks
from hvdtrain.plugins.watchdog.heartbeats import ENDED, FAILED, Heartbeats
from hvdtrain.runtime.watchdog import Pace, Watchdog

UNKNOWN = 1800.0
"""Seconds without progress that are allowed before any interval of a pace is known; always, in the first two paces."""

SECOND = 300.0
"""The least that is allowed while only the first interval is known, in which frameworks compile."""

WAITS_IN = (
    "horovod.",
    "hvdtrain.comm.",
    "hvdtrain.plugins.horovod.",
    "torch.distributed.",
    "torch.cuda.",
    "tensorflow.python.eager.",
)
"""The modules in which a rank waits for others. TensorFlow runs the collectives inside its graphs."""

SECONDS_FOR_STACKS = 0.5
"""How long silent processes have to print their stacks before they are killed."""

LEAST = 60.0
"""Afterwards: the least seconds that are allowed."""

TIMES = 20.0
"""So many times the longest interval between two signs of progress so far is allowed."""


@dataclass
class Patience:
    """How long a rank may make no progress, by pace.

    The first interval of a pace counts only until the second one is known, as frameworks compile in it. Planning is an
    exception: it compiles nothing, and its first interval, the plan of the training data, is often the longest one. Finishing is
    another one: mostly it takes no time at all, and many minutes if a disk is slow once.

    Args:
        fixed: the seconds to allow instead in all paces but the first two, which are not bound by the time of a step.
        is_stopping: whether the job got a signal to stop.

    >>> patience = Patience()
    >>> patience.seconds("steps")
    1800.0
    >>> patience.learn("steps", 100.0)
    >>> patience.seconds("steps")
    2000.0
    >>> for seconds in (0.5, 4.0):
    ...     patience.learn("steps", seconds)
    >>> patience.seconds("steps"), patience.seconds("evaluation"), Patience(fixed=15.0).seconds("steps")
    (80.0, 1800.0, 15.0)
    >>> patience.learn("planning", 10.0)
    >>> patience.seconds("planning")
    200.0
    >>> for _ in range(2):
    ...     patience.learn("finishing", 0.0)
    >>> patience.seconds("finishing")
    1800.0
    >>> patience.is_stopping = True
    >>> patience.seconds("steps"), patience.seconds("evaluation"), patience.seconds("saving")
    (60.0, 300.0, 1800.0)
    """

    fixed: float | None = None
    is_stopping: bool = False
    _first: dict[Pace, float] = field(default_factory=dict)
    _longest: dict[Pace, float] = field(default_factory=dict)

    def learn(self, pace: Pace, seconds: float) -> None:
        """Record an interval between two signs of progress."""
        longest = self._longest.get(pace)
        if pace == "finishing" or (longest is not None and seconds <= longest):
            return
        if pace in self._first or pace == "planning":
            self._longest[pace] = max(self._longest.get(pace, 0.0), seconds)
        else:
            self._first[pace] = seconds

    def seconds(self, pace: Pace) -> float:
        """Seconds that are allowed without progress."""
        if pace in ("start-up", "unhurried"):
            return UNKNOWN if self.fixed is None else max(UNKNOWN, self.fixed)
        if self.fixed is not None:
            return self.fixed
        if self.is_stopping and pace in ("steps", "evaluation"):  # only the present step is waited for, which may hang
            return max(LEAST, 3 * self._longest[pace]) if pace in self._longest else SECOND
        if pace in self._longest:
            return max(LEAST, TIMES * self._longest[pace])
        return max(SECOND, TIMES * self._first[pace]) if pace in self._first else UNKNOWN

    @property
    def seconds_of_silence(self) -> float:
        """Seconds that a rank waits for one in a callback that sends no more heartbeats: it may be stopped."""
        return LEAST if self.fixed is None else self.fixed


class JobWatchdog(Watchdog):
    """A context manager with a thread that ends the process if a rank does not call `beat` for too long.

    The watchdogs of all ranks find out together which rank hangs (`Heartbeats`). Rank 0 reports it, and the rank itself prints
    the stack of every thread. A rank that makes progress again by then continues, and so does one that was suspended.

    Args:
        timeout: seconds without a call of `beat` after which to end the process; None: by `Patience`.
        rank: this process's rank, for the message.
        heartbeats: connects it to the watchdogs of the other ranks; None: this rank is watched alone.
        launcher: how the processes exit.
        owns_process: print the stacks of this process when it crashes, and do not wait for the thread to end.

    Attributes:
        record: called before the job is ended, on the rank that decides so, with the reason, and whether another rank that has
            ended is the cause. It must neither raise nor block.
    """

    def __init__(
        self,
        timeout: float | None,
        rank: int,
        heartbeats: Heartbeats | None = None,
        launcher: Launcher | type[Launcher] = Launcher,
        owns_process: bool = True,
    ) -> None:
        self._owns_process = owns_process
        self.record: Callable[[str, bool], object] = lambda why, is_consequence: None
        self._has_work = heartbeats is not None or timeout != math.inf
        self._launcher = launcher
        self._patience = Patience(timeout)
        self._interval = 1.0 if timeout is None else min(1.0, timeout / 10)
        self._rank = rank
        self._heartbeats = Heartbeats(rank) if heartbeats is None else heartbeats
        self._last_beat = time.monotonic()
        self._beats = 0
        self._thread = threading.get_ident()
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._activity: object = "starting"
        self._pace: Pace = "start-up"
        self._done = threading.Event()
        self._sending = threading.Lock()  # so that ENDED or FAILED is the last message
        self._last_check = self._last_beat
        self._last_sent = -math.inf
        self._reported_at: float | None = None
        self._has_printed_stacks = False
        self._has_recorded = False

    def beat(self, activity: object, pace: Pace = "start-up") -> None:
        """Reset the timeout, and record what the process is about to do: an object whose text is asked for in messages."""
        now = time.monotonic()
        self._patience.learn(self._pace, now - self._last_beat)
        self._last_beat = now
        self._beats += 1
        self._activity = activity
        self._pace = pace

    def go_on(self) -> None:
        """Reset the timeout in the midst of an activity."""
        self._last_beat = time.monotonic()
        self._beats += 1

    def stop_soon(self) -> None:
        """Wait less for steps from now on: a signal asks the job to stop, which a rank that hangs never does."""
        self._patience.is_stopping = True

    def ended_ranks(self, seconds: float) -> list[str]:
        """Wait at most this long until another rank has ended; return a line for each one that has."""
        return self._heartbeats.wait_for_ended(seconds) if self._heartbeats.together else []

    def __enter__(self) -> JobWatchdog:
        # Print Python's stack if native code crashes, or if a memory-mapped file was truncated (SIGBUS).
        if self._owns_process and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
            faulthandler.register(STACK_SIGNAL, sys.__stderr__, all_threads=True)
        self._thread = threading.get_ident()
        if self._has_work:
            self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # All ranks raise an error of all ranks together, so none is left blocked on another.
        is_orderly = error is None or (isinstance(error, HvdtrainError) and error.on_every_rank)
        with self._sending:
            self._done.set()
            self._heartbeats.send(ENDED if is_orderly else FAILED)
        if not self._owns_process and self._has_work:
            self._watcher.join()

    def _watch(self) -> None:
        self._last_check = time.monotonic()
        has_failed = False
        while not self._done.is_set():
            try:
                self._check()
            except Exception as error:  # never let the thread die: without a watchdog, the job could hang
                if not has_failed:
                    has_failed = True
                    _print(f"rank {self._rank}: the watchdog had an error and keeps watching: {error!r}")
                self._done.wait(self._interval)
        self._heartbeats.close()

    def _check(self) -> None:
        """Send a heartbeat, act on the diagnosis of the job, and listen to the other ranks for an interval."""
        now = time.monotonic()
        was_suspended = now - self._last_check > 10 * self._interval + 5  # the whole process, by SIGSTOP or the batch system
        self._last_check = now
        if was_suspended:
            self._last_beat = now
            self._heartbeats.reset_silence()
        heartbeat = self._heartbeat()
        if heartbeat.overdue or now - self._last_sent >= self._heartbeats.interval:
            with self._sending:
                if not self._done.is_set():
                    self._heartbeats.send(heartbeat)
            self._last_sent = now
        if not was_suspended:
            self._act(self._heartbeats.conclude(heartbeat), heartbeat)
        self._heartbeats.listen(self._interval)

    def _heartbeat(self) -> Heartbeat:
        idle = time.monotonic() - self._last_beat
        is_overdue = idle > self._patience.seconds(self._pace)
        heartbeat = Heartbeat(str(self._activity), idle, self._beats, _is_waiting(self._thread), is_overdue)
        # Another rank's callback may take its time, but a rank that is stopped in one never ends it.
        if self._pace == "unhurried" and heartbeat.waits and idle > self._patience.seconds_of_silence:
            overdue = replace(heartbeat, overdue=True)
            diagnosis = self._heartbeats.conclude(overdue)
            if diagnosis is not None and diagnosis.silent:
                return overdue
        return heartbeat

    def _act(self, diagnosis: Diagnosis | None, heartbeat: Heartbeat) -> None:
        """Report that there is no progress, give the other ranks time to report it, too, and end the process."""
        decides = self._heartbeats.decides
        if diagnosis is None:
            if self._reported_at is not None:
                self._heartbeats.broadcast(None)
                if self._has_printed_stacks:
                    _print(f"rank {self._rank}: makes progress again, in {self._activity}")
            self._reported_at = None
            self._has_printed_stacks = False
            return
        if self._reported_at is None:
            self._reported_at = time.monotonic()
            if decides and (text := describe(self._heartbeats, diagnosis, heartbeat)) is not None:
                _print(text)
        ends = diagnosis.ends or (decides and time.monotonic() - self._reported_at > 3 * self._interval)
        if self._rank in diagnosis.hanging and not self._has_printed_stacks:
            self._has_printed_stacks = True
            _print(
                f"rank {self._rank}: no progress for {heartbeat.idle:.0f} s (watchdog_timeout) in {heartbeat.activity}; "
                "its threads:"
            )
            _print(_stacks())
        has_work = bool(diagnosis.gone) and not has_waited_long(heartbeat)
        if decides and ends and not has_work and not self._has_recorded and not self._done.is_set():
            self._has_recorded = True  # before the others end: their launcher may then end this process
            hangs = f"rank {self._rank} hangs: no progress for {heartbeat.idle:.0f} s (watchdog_timeout) in {heartbeat.activity}"
            self.record(describe(self._heartbeats, diagnosis, heartbeat) or hangs, bool(diagnosis.gone))
        if decides:
            self._heartbeats.broadcast(replace(diagnosis, ends=ends))
        if has_work:
            return
        if ends and not self._done.is_set():
            if self._rank in diagnosis.hanging:
                os._exit(self._launcher.hung_status)
            # Not before: faulthandler reads the frames of threads that may run, which can crash a process.
            if request_stacks(self._heartbeats, diagnosis.silent):
                self._done.wait(SECONDS_FOR_STACKS)
            kill(self._heartbeats, diagnosis.silent)
            # The launcher reports the first rank that exits: let that be one that hangs. A rank that has disconnected exits at
            # once.
            if not self._done.wait(self._launcher.outlives):
                os._exit(self._launcher.peer_status)


def _print(text: str) -> None:
    """Print to stderr, or to its replacement in a test or a notebook, whose errors must not end the watchdog."""
    for stream in (sys.stderr, sys.__stderr__):
        if stream is not None:
            with suppress(Exception):
                print(text, file=stream, flush=True)
                return


def _stacks() -> str:
    """The stacks of all threads, from faulthandler: it reads no source code from a disk that may hang. It needs a real file."""
    try:
        with os.fdopen(os.memfd_create("stacks"), "r+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().rstrip("\n")
    except OSError as error:
        return f"(no stack can be shown: {error})"


def _is_waiting(thread: int) -> bool:
    """Whether a thread is in code that waits for other ranks."""
    # A collection within this call, which locks the list of threads, may let a thread run that starts one: both wait for ever.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()
    return frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(WAITS_IN)
