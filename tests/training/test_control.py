"""When a training is saved and stopped, and what an epoch's clock adds to its progress."""

import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.checkpoint.progress import EpochProgress, Progress
from hvdtrain.comm.launchers import Place
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.learner.reducer import Traffic
from hvdtrain.plugins.local_ranks.launcher import Ngpu
from hvdtrain.plugins.local_ranks.reports import TIMES
from hvdtrain.runtime.interrupt import Interrupt
from hvdtrain.runtime.timer import Timer
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.start_up.ranks import job_began
from hvdtrain.start_up.sigterm import mpirun_line
from hvdtrain.training.control import Interval
from hvdtrain.training.epoch import EpochClock
from hvdtrain.training.limits import TrainingLimits
from hvdtrain.training.vote import Requests, Vote


@dataclass
class Clock:
    """Seconds that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_steps_count_from_where_the_training_goes_on() -> None:
    interval = Interval(4, None, 6, has_clock=True)
    due = []
    for step in (7, 8, 8, 11, 13, 20):
        if interval.is_due(step):
            due.append(step)
            interval.done(step)
    assert due == [8, 13, 20]
    assert not Interval(None, None, 0, has_clock=True).is_due(4)


@pytest.mark.parametrize("minutes", [2.0, lambda: 2.0])
def test_a_request_stays_until_it_is_carried_out(minutes: Any) -> None:
    """Also where that takes a while, as in an evaluation; and an exchange that began before does not repeat it."""
    clock = Clock()
    interval, other = (Interval(None, minutes, 0, has_clock, clock) for has_clock in (True, False))
    assert not interval.is_wanted()
    clock.now = 120.0
    assert [interval.is_wanted(), interval.is_wanted(), other.is_wanted()] == [True, True, False]
    interval.count(1)
    interval.count(0)
    assert interval.is_due(1)
    interval.done(1)
    interval.count(1)
    assert not interval.is_due(2)
    assert not interval.is_wanted()
    clock.now = 240.0
    assert interval.is_wanted()
    interval.count(1)
    assert interval.is_due(3)


def test_a_restart_does_not_begin_the_time_limit_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    launcher = Ngpu({TIMES: f"{now - 100},{now}"}, Place(None))
    monkeypatch.setattr("time.time", lambda: now + 5000.0)  # the clock may be set between two starts
    monkeypatch.setattr("hvdtrain.comm.this_process.launcher", lambda: launcher)
    settings: Any = SimpleNamespace(process=SimpleNamespace(is_own=True))
    assert job_began(settings) == pytest.approx(now + 4900.0, abs=1.0)


@dataclass
class Meter:
    """Seconds of steps that a test sets."""

    seconds: list[float] = field(default_factory=list)

    def take_step_seconds(self) -> float:
        taken, self.seconds = sum(self.seconds), []
        return taken


def test_a_clock_adds_what_was_not_added_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Clock(100.0)
    monkeypatch.setattr("hvdtrain.training.epoch.time", SimpleNamespace(perf_counter=now))
    meter, reducer, timer = Meter(), SimpleNamespace(traffic=Traffic(0, 0)), Timer(now)
    untyped: Any = (timer, meter, reducer)
    clock, current = EpochClock(*untyped), EpochProgress(1, 0, elapsed=7.0, syncs=1, sent=50)
    clock.begin()
    now.now = 103.0
    assert clock.elapsed(current) == 10.0
    meter.seconds, reducer.traffic = [1.5], Traffic(2, 300)
    clock.count(current)
    clock.count(current)
    assert (current.elapsed, current.computing, current.syncs, current.sent) == (10.0, 1.5, 3, 350)
    timer.book("saving", 1.0)
    now.now = 106.0
    clock.count(current)
    assert (current.elapsed, current.computing, current.sent) == (13.0, 1.5, 350)  # saving is not computing
    seconds = clock.seconds()
    assert seconds["saving"] == 1.0
    assert sum(seconds.values()) == 6.0
    clock.begin()
    assert clock.seconds() == {"rest": 0.0}


def test_limits_are_reached_after_the_last_epoch_or_earlier() -> None:
    limits = TrainingLimits(3, ends_early=lambda progress: "enough" if progress.history else None)
    assert not limits.are_reached(Progress(epoch=2))
    assert limits.are_reached(Progress(epoch=3))
    assert limits.are_reached(Progress(epoch=2, history=[EpochRecord(2, 0.1)]))
    assert not limits.are_reached(Progress(epoch=2, history=[EpochRecord(2, 0.1)], current=EpochProgress(3, 20)))


def test_a_vote_counts_often_where_steps_are_long_and_seldom_where_they_are_short() -> None:
    clock = Clock()
    vote = Vote(SingleCommunicator(), list, 0.1, clock)
    asked = []

    def step(seconds: float, wishes: Requests, place: str = "training") -> Requests | None:
        clock.now += seconds
        return vote.step(lambda: asked.append(clock.now) or wishes, place)  # type: ignore[func-returns-value]

    assert step(1.0, Requests(stop=1)) is None
    assert step(1.0, Requests()) == Requests(stop=1)
    for _ in range(20):
        step(0.01, Requests(save=1))
    before = len(asked)
    for _ in range(100):
        step(0.01, Requests())
    assert 8 <= len(asked) - before <= 12  # in a second
    step(5.0, Requests(stop=1), "evaluation")  # its steps are long: at once, and again in the next one
    assert step(5.0, Requests(), "evaluation") == Requests(stop=1)


@pytest.mark.parametrize(
    ("grace", "seconds", "expected"),
    [(1.0, None, "a second later and returns 1. Saving"), (5.0, 7.0, "5 s later and returns 1. A checkpoint takes 7.0 s")],
)
def test_what_is_said_of_a_signal(grace: float, seconds: float | None, expected: str) -> None:
    interrupt = Interrupt(None, grace)
    interrupt.seconds_to_save = seconds
    assert expected in mpirun_line(interrupt)
    assert mpirun_line(Interrupt(None)), "a signal handler must not raise"


def test_a_hang_up_that_is_ignored_stays_ignored_and_what_the_config_handles_is_its_own() -> None:
    numbers = (signal.SIGHUP, signal.SIGUSR2)
    former = {number: signal.getsignal(number) for number in numbers}
    try:
        for hang_up, reason in ((signal.SIG_IGN, "SIGUSR2"), (signal.SIG_DFL, "SIGHUP")):
            signal.signal(signal.SIGHUP, hang_up)
            signal.signal(signal.SIGUSR2, signal.SIG_DFL if hang_up == signal.SIG_IGN else lambda *_: None)
            with Interrupt(None) as interrupt:
                interrupt.defer()
                for number in numbers:
                    signal.raise_signal(number)
                assert interrupt.reason == reason
            assert signal.getsignal(signal.SIGHUP) == hang_up
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
