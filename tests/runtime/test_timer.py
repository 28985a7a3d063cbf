"""The timer: every second is counted once, under the right name."""

import time
from collections.abc import Iterator

import pytest

from hvdtrain.runtime.timer import Timer, clock_text


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_seconds_under_a_name_add_up(clock: Clock) -> None:
    timer = Timer(clock)
    for seconds in (1.0, 2.5):
        with timer.span("compute"):
            clock.now += seconds
        clock.now += 10.0  # outside of any span: nobody's
    assert timer.seconds == {"compute": 3.5}


def test_nested_spans_count_for_the_innermost_name(clock: Clock) -> None:
    timer = Timer(clock)
    with timer.span("compute"):
        clock.now += 1.0
        with timer.span("communication"):
            clock.now += 2.0
            with timer.span("compute"):
                clock.now += 4.0
            clock.now += 8.0
        clock.now += 16.0
    assert timer.seconds == {"compute": 21.0, "communication": 10.0}


def test_an_exception_closes_the_span(clock: Clock) -> None:
    timer = Timer(clock)

    def fail() -> None:
        with timer.span("outer"), timer.span("inner"):
            clock.now += 1.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    clock.now += 5.0
    with timer.span("after"):
        clock.now += 2.0
    assert timer.seconds == {"inner": 1.0, "outer": 0.0, "after": 2.0}


def test_waiting_counts_and_what_is_done_with_a_value_does_not(clock: Clock) -> None:
    def slow() -> Iterator[int]:
        for number in range(3):
            clock.now += 1.0
            yield number
        clock.now += 0.5  # finding out that there is no more is waiting, too

    timer = Timer(clock)
    taken = []
    for number in timer.waits("data wait", slow()):
        taken.append(number)
        clock.now += 10.0
    assert taken == [0, 1, 2]
    assert timer.seconds == {"data wait": 3.5}


def test_waiting_passes_none_and_exceptions_on(clock: Clock) -> None:
    def failing() -> Iterator[None]:
        yield None
        clock.now += 2.0
        raise ValueError("no more")

    timer = Timer(clock)
    values = timer.waits("wait", failing())
    assert next(values) is None
    with pytest.raises(ValueError, match="no more"):
        next(values)
    assert timer.seconds == {"wait": 2.0}


def test_take_begins_anew(clock: Clock) -> None:
    timer = Timer(clock)
    with timer.span("a"):
        clock.now += 1.0
    assert timer.take() == {"a": 1.0}
    assert timer.take() == {}
    with timer.span("a"):
        clock.now += 2.0
    assert timer.take() == {"a": 2.0}


def test_take_within_a_span_loses_nothing(clock: Clock) -> None:
    timer = Timer(clock)
    with timer.span("epoch"):
        clock.now += 1.0
        first = timer.take()
        clock.now += 2.0
    assert sum(first.values()) + sum(timer.take().values()) == 3.0


def test_the_clock_is_a_wall_clock() -> None:
    timer = Timer()
    with timer.span("sleep"):
        time.sleep(0.02)
    assert 0.02 <= timer.seconds["sleep"] < 5.0


def test_seconds_as_hours_minutes_and_seconds() -> None:
    seconds = [0, 59.99, 60, 3599, 3600, 1738.4, 90061, 360000]
    assert [clock_text(one) for one in seconds] == [
        "0:00:00",
        "0:00:59",
        "0:01:00",
        "0:59:59",
        "1:00:00",
        "0:28:58",
        "25:01:01",
        "100:00:00",
    ]
