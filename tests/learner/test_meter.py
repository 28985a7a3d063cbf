"""Scores that come late from a device: what is read when."""

import numpy

from hvdtrain.learner.meter import MAX_PENDING, Meter, Transfer
from hvdtrain.runtime.timer import CpuClock

TENSOR = list[float]
"""Here: the sum and the count of a batch."""


class Device:
    """Attributes: arrived: how many tensors have arrived; reads: how many were read at a time."""

    def __init__(self) -> None:
        self.arrived = 0
        self.started: list[TENSOR] = []
        self.reads: list[int] = []

    def start(self, numbers: TENSOR) -> int:
        self.started.append(numbers)
        return len(self.started)

    def read(self, places: list[int]) -> list[float]:
        self.reads.append(len(places))
        return [number for place in places for number in self.started[place - 1]]

    def has_arrived(self, place: int) -> bool:
        return place <= self.arrived


def pending(transfer: Transfer) -> Meter:
    parameters = [("weight", numpy.array([numpy.nan])), ("bias", numpy.zeros(1))]
    return Meter(transfer, lambda: parameters, CpuClock())


def add(scores: Meter, step: int, value: float) -> None:
    scores.add({"ce": True}, [value, 1.0], step, numpy.array([step]), train=True)


def test_scores_are_read_when_they_have_arrived() -> None:
    device = Device()
    scores = pending(Transfer(device.read, device.start, device.has_arrived, MAX_PENDING))
    add(scores, 0, 1.0)
    add(scores, 1, float("nan"))
    assert scores.drain_ready().means() == {}
    assert device.reads == []
    device.arrived = 1
    assert scores.drain_ready().means() == {"ce": 1.0}
    assert scores.take_not_finite() == []
    device.arrived = 2
    add(scores, 2, 3.0)  # looks at what has arrived
    [found] = scores.take_not_finite()
    assert (found.step, found.indices, found.parameters) == (1, (1,), ("weight",))
    scores.drain_ready()
    add(scores, 3, 5.0)
    assert scores.take_scores().means() == {"ce": 4.0}  # waits
    assert device.reads == [1, 1, 2]
    assert scores.take_scores().counts() == {}


def test_all_are_read_where_nobody_knows_what_has_arrived() -> None:
    device = Device()
    scores = pending(Transfer(device.read, device.start, max_pending=3))
    for step in range(4):
        add(scores, step, float(step))
    assert device.reads == [3]
    assert scores.drain_ready().means() == {"ce": 1.5}
    assert device.reads == [3, 1]
