"""Gathers of picklable values over collectives for tensors: every value arrives, and small ones in one message."""

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.comm.torch_pickled import LEAST_SPACE, MOST_SPACE, gather_pickled


def gathered(comm: Communicator, value: Any) -> tuple[list[Any], list[str]]:
    """What a rank gets, and the names of the messages."""
    names = []

    def gather_rows(tensor: torch.Tensor, lengths: Sequence[int], name: str) -> torch.Tensor:
        names.append(name)
        [rows] = comm.gather_rows([tensor], name=name)
        assert len(tensor) == lengths[comm.rank]
        assert len(rows) == sum(lengths)
        return torch.as_tensor(rows)

    return gather_pickled(value, comm.size, gather_rows), names


def test_small_values_need_one_message() -> None:
    for got, names in on_ranks(3, lambda comm: gathered(comm, ("plan", comm.rank, None))):
        assert got == [("plan", rank, None) for rank in range(3)]
        assert names == ["first"]


@pytest.mark.parametrize("seed", range(5))
def test_values_of_any_size_arrive_whole(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    frame = len(pickle.dumps(bytes(1000))) - 1000
    edges = [MOST_SPACE - frame + difference for difference in (-1, 0, 1)]
    drawn = torch.randint(0, 4 * MOST_SPACE, (4,), generator=generator).tolist()
    sizes = [*edges, *drawn, 10**6][seed % 3 :][:4]
    values = [bytes(torch.randint(0, 256, (size,), generator=generator).tolist()) for size in sizes]
    for got, names in on_ranks(4, lambda comm: gathered(comm, values[comm.rank])):
        assert got == values
        assert names == (["first", "rest"] if any(len(pickle.dumps(value)) > MOST_SPACE for value in values) else ["first"])


def test_a_gather_of_many_ranks_does_not_send_much() -> None:
    ranks, size = 16384, len(pickle.dumps(("files", (None, None))))
    assert size <= LEAST_SPACE
    sent = []

    def from_all(tensor: torch.Tensor, lengths: Sequence[int], _: str) -> torch.Tensor:
        sent.append(tensor)
        return tensor.repeat(ranks, 1)

    assert gather_pickled(("files", (None, None)), ranks, from_all) == [("files", (None, None))] * ranks
    assert [tensor.nbytes for tensor in sent] == [72]
