"""Averages in 8, 4 and 2 bits, on ranks that are threads: what is sent, how exact it is, and that nothing is lost."""

from pathlib import Path

import pytest
import torch
from learners import problems
from thread_ranks import ThreadCommunicator, on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.learner.model_state import ModelState
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.plugins.compression.quantized import PER_SCALE, Quantized, decode, encode
from hvdtrain.runtime.timer import Timer

ERRORS = {8: 0.01, 4: 0.15, 2: 0.4}
"""By the number of bits, more than the relative error of one message of normally distributed values."""

SHAPES = [(100, 30), (7,), (64,)]


class Kept:
    """What of a model's state a compressor uses."""

    def __init__(self) -> None:
        self.shared: dict[str, list[torch.Tensor]] = {}
        self.own: dict[str, list[torch.Tensor]] = {}


def values_of(rank: int, step: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) * 0.01 for shape in SHAPES]


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def opened(comm: Communicator, bits: int) -> tuple[Quantized, ModelState]:
    compressor, state = Quantized(comm, bits), Kept()
    compressor.begin(state)  # type: ignore[arg-type]
    return compressor, state  # type: ignore[return-value]


@pytest.mark.parametrize("bits", ERRORS)
def test_a_value_takes_so_many_bits_and_a_block_a_scale(bits: int) -> None:
    values = torch.randn(3, 5 * PER_SCALE, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-6], [1.0], [1e6]])
    values[1, :PER_SCALE] = 0.0
    encoded = encode(values, bits)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (3, 5 * PER_SCALE * bits // 8 + 5 * 2)
    decoded = decode(encoded, bits)
    assert not decoded[1, :PER_SCALE].any()
    for row, given in zip(decoded, values, strict=True):
        assert error(row, given) < ERRORS[bits]
    sparse = torch.zeros(1, PER_SCALE)
    sparse[0, 3] = -5.0
    assert error(decode(encode(sparse, bits), bits), sparse) < 1.0  # never worse than to send nothing
    if bits > 2:
        assert error(decode(encode(sparse, bits), bits), sparse) < 0.01


@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_remains_so_and_is_not_kept(bits: int, bad: float) -> None:
    values = torch.ones(1, 2 * PER_SCALE)
    values[0, 3] = bad
    decoded = decode(encode(values, bits), bits)
    assert not decoded[0, :PER_SCALE].isfinite().any()
    assert decoded[0, PER_SCALE:].isfinite().all()
    compressor, state = opened(SingleCommunicator(), bits)
    compressor._encode(values, "a")
    assert state.own["a"][0].isfinite().all()


@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_get_the_same_average_and_what_rounding_takes_away_comes_later(bits: int, size: int) -> None:
    def work(comm: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[str, int]], int]:
        compressor, _ = opened(comm, bits)
        first = compressor.finish(compressor.start(values_of(comm.rank), "average", name="a"))
        sums = [one.double() for one in first]
        for _ in range(39):
            again = compressor.finish(compressor.start(values_of(comm.rank), "average", name="a"))
            sums = [one + other for one, other in zip(sums, again, strict=True)]
        assert isinstance(comm, ThreadCommunicator)
        return first, [one / 40 for one in sums], comm.messages, compressor.sent

    ranks = on_ranks(size, work)
    elements = sum(torch.zeros(shape).numel() for shape in SHAPES)
    padded = -(-elements // (size * PER_SCALE)) * size * PER_SCALE
    for first, means, messages, sent in ranks:
        assert messages == [("a.shares", padded * bits // 8 + padded // PER_SCALE * 2)] * 40
        assert sent == 40 * messages[0][1]
        for number, shape in enumerate(SHAPES):
            exact = sum(values_of(rank)[number] for rank in range(size)) / size
            assert first[number].shape == shape
            assert torch.equal(first[number], ranks[0][0][number])
            assert error(first[number], exact) < 2 * ERRORS[bits]
            assert error(means[number].float(), exact) < 0.2 * ERRORS[bits]  # the errors do not add up


def test_other_types_and_what_has_to_be_exact_are_sent_as_they_are() -> None:
    def work(comm: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        compressor, state = opened(comm, 4)
        tensors = [torch.tensor([1.0, 2.0**-20]).double(), values_of(comm.rank)[0], torch.tensor([2.0**-30]).double()]
        mixed = compressor.finish(compressor.start(tensors, "sum", name="mixed"))
        assert len(state.own) == 2
        exact = compressor.finish(compressor.start(values_of(comm.rank), "sum", name="exact", exact=True))
        assert len(state.own) == 2
        return mixed, exact

    for mixed, exact in on_ranks(2, work):
        assert [one.dtype for one in mixed] == [torch.float64, torch.float32, torch.float64]
        assert mixed[0].tolist() == [2.0, 2.0**-19]
        assert mixed[2].item() == 2.0**-29
        assert torch.equal(exact[1], values_of(0)[1] + values_of(1)[1])


def test_one_rank_sends_nothing() -> None:
    keys = ReduceKeys(reduce_type="param", compression="int4")
    alone = keys.reducer(SingleCommunicator(), Timer())
    assert "bits" not in alone.description
    (description, *_) = on_ranks(2, lambda comm: keys.reducer(comm, Timer()).description)
    assert ", sent in 4 bits" in description


def test_what_a_config_gets_wrong_is_told_before_training(tmp_path: Path) -> None:
    averaging, given = "horovod_reduce_type = 'param'\n", "horovod_compression = 'int4'\n"
    assert problems(tmp_path, given) == ["horovod_compression: conflict"]
    assert problems(tmp_path, f"{averaging}{given}backend = 'tensorflow'\n") == ["horovod_compression: needs-backend"]
    assert problems(tmp_path, f"{averaging}horovod_compression = 'int2'\nmixed_precision = 'float16'\n") == []
