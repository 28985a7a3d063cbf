"""What a config's functions reduce over the ranks: ranks as threads."""

import math
from functools import partial
from typing import Any, Literal

import numpy
import pytest
import torch
from thread_ranks import on_ranks

import hvdtrain
from hvdtrain.comm.base import Communicator
from hvdtrain.comm.for_configs import use_communicator
from hvdtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "op", "expected"),
    [
        ([numpy.float32(1), numpy.float32(1e-9)], "sum", 1 + float(numpy.float32(1e-9))),
        ([1e16, 1.0, -1e16], "sum", 1.0),
        ([numpy.int32(2**31 - 1), numpy.int32(1)], "sum", 2**31),
        ([True, 2], "average", 1.5),
        ([math.inf, -math.inf], "sum", math.nan),
        ([1 + 1j, 2], "sum", 3 + 1j),
        ([numpy.array([1, 3e-8], "float32"), numpy.array([1e-8, 1], "float32")] * 8, "sum", [8, 8]),
        ([numpy.array([6e4], "float16"), numpy.array([6e4], "float16")], "average", [6e4]),
        ([numpy.array([2**31 - 1], "int32"), numpy.array([1], "int32")], "sum", [2**31]),
        ([torch.tensor([2**31 - 1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)], "sum", [2**31 + 1]),
        ([torch.tensor([1]), torch.tensor([2])], "average", [1.5]),
        ([torch.tensor([True]), torch.tensor([True])], "sum", [2]),
    ],
)
def test_what_a_config_reduces_is_exact_in_every_type(values: list[Any], op: Literal["sum", "average"], expected: object) -> None:
    def work(comm: Communicator) -> object:
        with use_communicator(comm):
            return hvdtrain.all_reduce(values[comm.rank], op)

    for found in on_ranks(len(values), work):
        numpy.testing.assert_allclose(numpy.asarray(found), expected, rtol=1e-7)
        assert not isinstance(found, numpy.float32)


def test_ranks_that_reduce_different_things_are_an_error() -> None:
    calls: list[tuple[object, Literal["sum", "max"]]] = [(torch.ones(2), "sum"), (torch.ones(3), "sum"), (1, "max")]

    def work(comm: Communicator, other: int) -> None:
        with use_communicator(comm):
            value, op = calls[other * comm.rank]
            hvdtrain.all_reduce(value, op, name="accuracy")

    shapes = r"accuracy: the value: .*float32, shape \(2,\) on rank 0 and a tensor of torch.float32, shape \(3,\) on rank 1"
    for other, expected in ((1, shapes), (2, "accuracy: the operation: .* got sum on rank 0 and max on rank 1")):
        with pytest.raises(ConfigError, match=expected):
            on_ranks(2, partial(work, other=other))
