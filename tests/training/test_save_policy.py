"""When a training is saved, and what an epoch's clock adds to its progress."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.checkpoint.progress import EpochProgress, Progress
from hvdtrain.learner.reducer import Traffic
from hvdtrain.runtime.timer import Timer
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.training.epoch import EpochClock
from hvdtrain.training.limits import TrainingLimits
from hvdtrain.training.save_policy import SavePolicy


@dataclass
class Clock:
    """Seconds that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_epochs_are_saved_at_multiples_and_at_the_end() -> None:
    policy = SavePolicy(TrainingLimits(5, save_epochs=2), step=0, has_clock=True, best_minutes=lambda: 1.0)
    assert [epoch for epoch in range(1, 6) if policy.is_due_after_epoch(epoch, is_last=epoch == 5)] == [2, 4, 5]


def test_steps_count_from_where_the_training_goes_on() -> None:
    policy = SavePolicy(TrainingLimits(1, save_steps=4), step=6, has_clock=True, best_minutes=lambda: 1.0)
    assert [step for step in (7, 8, 8, 11, 13, 20) if policy.is_due_after_step(step)] == [8, 13, 20]
    assert not SavePolicy(TrainingLimits(1), step=0, has_clock=True, best_minutes=lambda: 1.0).is_due_after_step(4)


@pytest.mark.parametrize("minutes", [2, "auto"])
def test_an_old_checkpoint_is_asked_for_once_by_the_rank_with_the_clock(minutes: Any) -> None:
    clock, limits = Clock(), TrainingLimits(1, save_minutes=minutes)
    policy, other = (SavePolicy(limits, 0, has_clock, clock, best_minutes=lambda: 2.0) for has_clock in (True, False))
    assert not policy.should_request()
    clock.now = 120.0
    assert [policy.should_request(), policy.should_request(), other.should_request()] == [True, False, False]
    policy.reset()
    assert not policy.should_request()
    clock.now = 240.0
    assert policy.should_request()


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
