"""The watchdog ends a job that makes no progress: neither MPI nor Horovod's Gloo detects a rank that hangs or is stopped."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal

from hvdtrain.errors import HvdtrainError
from hvdtrain.runtime.heartbeats import ENDED, FAILED, STACK_SIGNAL, Diagnosis, Heartbeat, Heartbeats, waits_long

Phase = Literal["start-up", "unhurried", "planning", "steps", "evaluation", "saving", "finishing", "handing on", "between"]
"""What a rank is busy with. Each takes its own time: 'unhurried' are callbacks, trackers and the end, as nobody knows how long
the user's code takes; 'finishing' waits for what is saved in the background; 'between' is the rest of an epoch."""

UNKNOWN = 1800.0
"""Seconds without progress that are allowed while nothing is known of a phase; in the first two, always."""

SECOND = 300.0
"""At least so many are allowed while only its first interval is known, in which frameworks compile."""

WAITS_IN = ("horovod.", "hvdtrain.comm.", "torch.distributed.", "torch.cuda.", "tensorflow.python.eager.")
"""The modules in which a rank waits for others. TensorFlow's graphs contain the collectives."""

SECONDS_TO_END = 1.0
"""How long a process whose connections are closed may take to be gone. Launchers end those that are left soon after."""

LEAST, TIMES = 60.0, 20.0
"""Afterwards: this many seconds, or this many times the longest interval between two signs of progress so far."""


@dataclass(frozen=True)
class Ending:
    """How the processes of a job end in which some ranks hang.

    Attributes:
        hung: the exit status of a rank that hangs.
        waited: that of the others.
        outlives: seconds for which the others outlive it.
    """

    hung: int = 1
    waited: int = 1
    outlives: float = 1.0


@dataclass
class Patience:
    """For how long a rank may be silent, by phase.

    The first interval of a phase counts only until the second one is known: frameworks compile in it. Nothing is compiled for a
    plan, and that of the training, which is often the longest one, comes first.

    Args:
        fixed: the seconds instead, in all phases but the first two, which no step's time says anything about.

    >>> patience = Patience()
    >>> patience.allowed("steps")
    1800.0
    >>> patience.learn("steps", 100.0)
    >>> patience.allowed("steps")
    2000.0
    >>> for seconds in (0.5, 4.0):
    ...     patience.learn("steps", seconds)
    >>> patience.allowed("steps"), patience.allowed("evaluation"), Patience(fixed=15.0).allowed("steps")
    (80.0, 1800.0, 15.0)
    >>> patience.learn("planning", 10.0)
    >>> patience.allowed("planning")
    200.0
    """

    fixed: float | None = None
    _first: dict[Phase, float] = field(default_factory=dict)
    _longest: dict[Phase, float] = field(default_factory=dict)

    def learn(self, phase: Phase, seconds: float) -> None:
        """Take note of an interval between two signs of progress."""
        if phase in self._first or phase == "planning":
            self._longest[phase] = max(self._longest.get(phase, 0.0), seconds)
        else:
            self._first[phase] = seconds

    def allowed(self, phase: Phase) -> float:
        """Seconds."""
        if phase in ("start-up", "unhurried"):
            return UNKNOWN if self.fixed is None else max(UNKNOWN, self.fixed)
        if self.fixed is not None:
            return self.fixed
        if phase in self._longest:
            return max(LEAST, TIMES * self._longest[phase])
        return max(SECOND, TIMES * self._first[phase]) if phase in self._first else UNKNOWN

    @property
    def of_silence(self) -> float:
        """Seconds for which a rank waits for one in a callback of which nothing is heard any more: it may be stopped."""
        return LEAST if self.fixed is None else self.fixed


class Watchdog:
    """A context manager with a thread that ends the process if a rank does not call `beat` for too long.

    The ranks' watchdogs find out together who hangs (`Heartbeats`): rank 0 says it, and the rank itself prints the stack of every
    thread. A rank that makes progress again meanwhile is let go on, and so is one that was itself suspended.

    Args:
        timeout: seconds without a call of `beat` after which to end the process; None: by `Patience`.
        rank: this process's rank, for the message.
        heartbeats: what the ranks tell each other; None: this rank is watched alone.
        ending: how the processes end.
        owns_process: print the stacks of this process when it crashes, and leave the thread to end by itself; else wait for it.
    """

    def __init__(
        self,
        timeout: float | None,
        rank: int,
        heartbeats: Heartbeats | None = None,
        ending: Ending = Ending(),
        owns_process: bool = True,
    ) -> None:
        self._owns_process = owns_process
        self._has_work = heartbeats is not None or timeout != math.inf
        self._ending = ending
        self._patience = Patience(timeout)
        self._interval = 1.0 if timeout is None else min(1.0, timeout / 10)
        self._rank = rank
        self._heartbeats = Heartbeats(rank) if heartbeats is None else heartbeats
        self._last_beat = time.monotonic()
        self._beats = 0
        self._thread = threading.get_ident()
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._activity = "starting"
        self._phase: Phase = "start-up"
        self._done = threading.Event()
        self._telling = threading.Lock()  # so that the last word is that this rank has ended
        self._looked = self._last_beat
        self._last_sent = -math.inf
        self._reported_at: float | None = None
        self._has_shown_its_stack = False

    def beat(self, activity: str, phase: Phase = "start-up") -> None:
        """Reset the timeout, and record what the process does from now on, for the message."""
        now = time.monotonic()
        self._patience.learn(self._phase, now - self._last_beat)
        self._last_beat = now
        self._beats += 1
        self._activity, self._phase = activity, phase

    def ended_ranks(self, seconds: float) -> list[str]:
        """Which other ranks have ended; waits for so long at most until there is one."""
        return self._heartbeats.wait_for_ended(seconds) if self._heartbeats.together else []

    def __enter__(self) -> Watchdog:
        if (
            self._owns_process and sys.__stderr__ is not None
        ):  # print Python's stack if native code crashes or a mapped file was truncated (SIGBUS)
            faulthandler.enable(sys.__stderr__)
            faulthandler.register(STACK_SIGNAL, sys.__stderr__, all_threads=True)
        self._thread = threading.get_ident()
        if self._has_work:
            self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Of an error of all ranks, each has done what it had to: nobody waits in vain.
        is_orderly = error is None or (isinstance(error, HvdtrainError) and error.on_every_rank)
        with self._telling:
            self._done.set()
            self._heartbeats.tell(ENDED if is_orderly else FAILED)
        if not self._owns_process and self._has_work:
            self._watcher.join()

    def _watch(self) -> None:
        self._looked = time.monotonic()
        has_failed = False
        while not self._done.is_set():
            try:
                self._look()
            except Exception as error:  # a dead watchdog would let the job hang: it goes on, whatever it meets
                if not has_failed:
                    has_failed = True
                    _print(f"rank {self._rank}: the watchdog met an error and goes on watching: {error!r}")
                self._done.wait(self._interval)
        self._heartbeats.close()

    def _look(self) -> None:
        """Tell the others how this rank is, act on what all of them say, and listen to them for an interval."""
        now = time.monotonic()
        suspended = now - self._looked > 10 * self._interval + 5  # the whole process, by SIGSTOP or the batch system
        self._looked = now
        if suspended:
            self._last_beat = now
            self._heartbeats.forgive()
        own = self._sign()
        if own.overdue or now - self._last_sent >= self._heartbeats.interval:
            with self._telling:
                if not self._done.is_set():
                    self._heartbeats.tell(own)
            self._last_sent = now
        if not suspended:
            self._act(self._heartbeats.conclude(own), own)
        self._heartbeats.listen(self._interval)

    def _sign(self) -> Heartbeat:
        idle = time.monotonic() - self._last_beat
        overdue = idle > self._patience.allowed(self._phase)
        sign = Heartbeat(self._activity, idle, self._beats, _waits(self._thread), overdue)
        if self._phase == "unhurried" and sign.waits and idle > self._patience.of_silence:
            impatient = replace(sign, overdue=True)
            diagnosis = self._heartbeats.conclude(impatient)
            if diagnosis is not None and diagnosis.silent:
                return impatient
        return sign

    def _act(self, diagnosis: Diagnosis | None, own: Heartbeat) -> None:
        """Report that there is no progress, give the other ranks' watchdogs the time to do so, too, and end the process."""
        decides = self._heartbeats.decides
        if diagnosis is None:
            if self._reported_at is not None:
                self._heartbeats.broadcast(None)
                if self._has_shown_its_stack:
                    _print(f"rank {self._rank}: makes progress again, in {self._activity}")
            self._reported_at, self._has_shown_its_stack = None, False
            return
        if self._reported_at is None:
            self._reported_at = time.monotonic()
            if decides and (text := self._heartbeats.describe(diagnosis, own)) is not None:
                _print(text)
            self._heartbeats.ask_for_stacks(diagnosis.silent)
        ends = diagnosis.ends or (decides and time.monotonic() - self._reported_at > 3 * self._interval)
        if self._rank in diagnosis.hanging and not self._has_shown_its_stack:
            self._has_shown_its_stack = True
            _print(f"rank {self._rank}: no progress for {own.idle:.0f} s (watchdog_timeout) in {own.activity}; its threads:")
            _print(_stacks())
        if decides:
            self._heartbeats.broadcast(replace(diagnosis, ends=ends))
        if diagnosis.gone and not waits_long(own):  # it has something to do yet
            return
        if ends and not self._done.is_set():
            if self._rank in diagnosis.hanging:
                os._exit(self._ending.hung)
            self._heartbeats.kill(diagnosis.silent)
            # What the launcher says of the first rank that ends is about one that hangs. Who has disconnected does not wait.
            if not self._done.wait(self._ending.outlives):
                os._exit(self._ending.waited)


def _print(text: str) -> None:
    """To stderr, whatever a test or a notebook has put in its place: what fails there must not end the watchdog."""
    for stream in (sys.stderr, sys.__stderr__):
        if stream is not None:
            with suppress(Exception):
                print(text, file=stream, flush=True)
                return


def _stacks() -> str:
    """Those of all threads. faulthandler, which reads no source code from a disk that may hang, wants a real file."""
    try:
        with os.fdopen(os.memfd_create("stacks"), "r+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().rstrip("\n")
    except OSError as error:
        return f"(no stack can be shown: {error})"


def _waits(thread: int) -> bool:
    """Whether a thread is in code that waits for other ranks."""
    frame = sys._current_frames().get(thread)
    return frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(WAITS_IN)
