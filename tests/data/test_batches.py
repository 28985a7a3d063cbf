"""Padding and reading ahead."""

import threading
import time
from collections.abc import Iterator

import numpy
import pytest

from hvdtrain.data.padding import pad
from hvdtrain.data.read_ahead import ReadAhead


def test_padding_puts_zeros_behind() -> None:
    padded = pad([numpy.array([[1, 2]], numpy.float32), numpy.array([[3, 4], [5, 6]], numpy.float32)])
    assert padded.values.dtype == numpy.float32
    assert padded.values.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]
    assert padded.seq_lens.dtype == numpy.int32
    assert padded.seq_lens.tolist() == [1, 2]


def test_padding_of_empty_sequences_and_strings() -> None:
    assert pad([numpy.zeros(0, numpy.int32)]).values.shape == (1, 0)
    padded = pad([numpy.array(["a"], dtype=object), numpy.array(["b", "c"], dtype=object)])
    assert padded.values.tolist() == [["a", ""], ["b", "c"]]


def test_values_come_in_order_and_the_thread_ends() -> None:
    with ReadAhead(range(100), depth=lambda _: 3) as values:
        assert list(values) == list(range(100))
    assert not reading()


def test_the_next_value_is_begun_before_the_present_one_is_used() -> None:
    begun: list[int] = []

    def begin(value: int) -> int:
        begun.append(value)
        return 10 * value

    with ReadAhead(range(5), begin=begin) as values:
        while reading():  # all values are there
            pass
        assert next(values) == 0
        assert begun == [0, 1]
        assert list(values) == [10, 20, 30, 40]
    assert begun == [0, 1, 2, 3, 4]


def test_an_error_is_raised_where_the_value_would_have_come() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("planted")

    with ReadAhead(failing()) as values:
        assert next(values) == 1
        with pytest.raises(ValueError, match="planted"):
            next(values)
    assert not reading()


def test_leaving_early_stops_the_reading() -> None:
    taken = []

    def endless() -> Iterator[int]:
        while True:
            taken.append(1)
            yield len(taken)

    with ReadAhead(endless(), depth=lambda _: 2) as values:
        assert next(values) == 1
    assert not reading()
    count = len(taken)
    assert count <= 6
    time.sleep(0.05)
    assert len(taken) == count


def reading() -> bool:
    return any(thread.name == "read-ahead" for thread in threading.enumerate())
