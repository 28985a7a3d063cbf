"""Where the seconds of a training go, over its starts, and how often to save."""

import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from hvdtrain.plugins.goodput.measured import FIRST_SAVE, MeasuredGoodput, best_interval
from hvdtrain.plugins.goodput.spent import Spent, before_start
from hvdtrain.runtime.goodput import process_began
from hvdtrain.runtime.timer import Timer


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_every_second_of_three_starts_has_one_cause() -> None:
    clock = Clock(1000.0)
    timer = Timer(clock)
    with timer.span("communication"):  # before the first epoch: part of the start
        clock.now += 1
    goodput = MeasuredGoodput(timer, None, began=996.0, clock=clock)
    assert goodput.save_interval() == FIRST_SAVE
    clock.now += 2
    recorded = goodput.spent()
    clock.now += 1
    goodput.go_on()
    with timer.span("compute"):
        clock.now += 20
    with timer.span("data wait"):
        clock.now += 3
    timer.take()
    saved = goodput.spent()
    assert (saved.start, saved.useful, saved.waiting, saved.seconds) == (8.0, 20.0, 3.0, 31.0)
    with timer.span("saving"):
        clock.now += 2
    goodput.count_save()
    clock.now += 5  # killed at 1034

    before = before_start(saved, recorded, [clock.now], last_sign=0.0)
    assert (before.useful, before.repeated, before.seconds, before.failures) == (20.0, 7.0, 38.0, 1)
    second = MeasuredGoodput(Timer(clock), before, began=clock.now, clock=clock)
    clock.now += 4
    noted = second.spent()
    clock.now += 6  # killed before it saved
    before = before_start(saved, noted, [1034.0, clock.now], last_sign=0.0)
    assert (before.useful, before.restart, before.repeated, before.starts, before.failures) == (20.0, 4.0, 13.0, 2, 2)

    timer = Timer(clock)
    third = MeasuredGoodput(timer, before, began=clock.now, clock=clock)
    third.go_on()
    with timer.span("evaluation"):
        clock.now += 5
    clock.now += 1
    end = third.spent(is_end=True)
    assert end.seconds == clock.now - 996.0
    assert (end.useful, end.rest, end.starts) == (25.0, 1.0, 3)
    assert Spent.from_state(asdict(end)) == end
    assert end.entries()["share"] == round(25 / end.seconds, 4)

    later = before_start(end, None, [], last_sign=9999.0)  # after a stop, another job goes on a day later
    assert later == replace(end, is_end=False)


def test_starts_that_failed_before_their_first_record_and_an_older_checkpoint() -> None:
    saved, recorded = Spent(until=100, useful=50, rest=50, starts=1), Spent(until=200, useful=90, rest=60, starts=2)
    before = before_start(saved, recorded, [150.0, 210.0, 220.0], last_sign=205.0)
    assert (before.until, before.useful, before.repeated, before.starts, before.failures) == (210.0, 50, 50.0, 3, 2)
    assert before_start(saved, recorded, [], last_sign=205.0).until == 205.0
    assert before_start(None, None, [], last_sign=205.0) == Spent()


@pytest.mark.parametrize("jump", [3e7, -3e7])
def test_a_clock_that_was_set_between_two_starts_counts_nothing(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1000.0)
    saved = MeasuredGoodput(Timer(clock), None, began=996.0, clock=clock).spent()
    recorded = replace(saved, starts=2, failures=1, until=1100.0)
    monkeypatch.setattr("hvdtrain.plugins.goodput.spent.AHEAD", saved.ahead + jump)
    before = before_start(saved, recorded, [1100.0 + jump], last_sign=1100.0 + jump)
    assert (before.seconds, before.starts, before.failures, before.jump) == (saved.seconds, 2, 2, jump)
    assert replace(before, boot=before.boot + 1).jump == 0.0


@pytest.mark.parametrize("state", [None, {}, {"useful": "much"}, {"useful": float("nan")}, [1]])
def test_damaged_records_are_none(state: object) -> None:
    assert Spent.from_state(state) is None


def test_the_chosen_interval_loses_least() -> None:
    """With failures at random, trainings with the chosen interval are faster than those with shorter or longer ones."""

    def seconds(interval: float, cost: float, life: float) -> float:
        generator, total, done = random.Random(1), 0.0, 0.0
        next_failure = generator.expovariate(1 / life)
        while done < 400 * life:
            if next_failure < interval + cost:  # the work since the last checkpoint is lost
                total += next_failure
                next_failure = generator.expovariate(1 / life)
            else:
                total, done, next_failure = total + interval + cost, done + interval, next_failure - interval - cost
        return total

    for cost, life in ((0.1, 60.0), (5.0, 3600.0), (20.0, 60.0)):
        best = best_interval(cost, life)
        assert seconds(best, cost, life) < min(seconds(best / 2.5, cost, life), seconds(best * 2.5, cost, life))


def test_the_interval_follows_the_failures_so_far() -> None:
    clock = Clock(0.0)
    spent = Spent(until=0.0, useful=590.0, saving=10.0, starts=11, failures=10, saves=100)
    often = MeasuredGoodput(Timer(clock), spent, 0.0, clock)
    seldom = MeasuredGoodput(Timer(clock), replace(spent, failures=0), 0.0, clock)
    assert often.save_interval() == best_interval(0.1, 600 / 10.5)
    assert seldom.save_interval() == best_interval(0.1, 1200.0)
    assert often.describe_interval() == "a checkpoint every 3.31 s, by 0.1 s for each and 10 failures in 0:10:00"


def test_the_time_at_which_a_process_began() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert before - 0.1 < process_began(process.pid) < time.time() + 0.1
        process.communicate(b"\n")
    assert process_began(os.getpid()) < before
    assert process_began(2**30) >= before
