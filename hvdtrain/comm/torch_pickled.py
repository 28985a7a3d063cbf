"""Picklable values of some ranks, gathered as tensors of PyTorch, in one message if they are small.

The collectives of PyTorch and of Horovod for objects gather the lengths first, and wait for all ranks twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

LENGTH = 8
"""The bytes of a length, an int64."""

LEAST_SPACE, MOST_SPACE = 64, 1024
"""Bytes of each rank in the first message. It has less space on many ranks, as every rank receives it from all."""

SPACE_OF_ALL = 2**14
"""Bytes of all ranks in the first message, within these limits."""


def gather_pickled(value: T, size: int, gather_rows: Callable[[Any, Sequence[int], str], Any]) -> list[T]:
    """Collective. Every rank's value, in rank order.

    Args:
        size: the number of ranks.
        gather_rows: concatenates a tensor of every rank along the first axis, given the tensor, that axis's length by rank, and a
            name.
    """
    message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    space = first_space(size)
    first = torch.zeros(1, LENGTH + space, dtype=torch.uint8)
    first[0, :LENGTH] = torch.tensor([len(message)]).view(torch.uint8)
    first[0, LENGTH : LENGTH + len(message)] = message[:space]
    received = gather_rows(first, [1] * size, "first")
    lengths = received[:, :LENGTH].contiguous().view(torch.int64).flatten().tolist()
    missing = [max(0, length - space) for length in lengths]
    remainders = gather_rows(message[space:], missing, "rest").split(missing) if any(missing) else [message[:0]] * size
    begun = received[:, LENGTH:].numpy()
    return [
        pickle.loads(row[:length].tobytes() + more.numpy().tobytes())
        for row, length, more in zip(begun, lengths, remainders, strict=True)
    ]


def first_space(size: int) -> int:
    """The bytes of each of `size` ranks in the first message.

    >>> first_space(2), first_space(64), first_space(16384)
    (1024, 256, 64)
    """
    return min(max(SPACE_OF_ALL // size, LEAST_SPACE), MOST_SPACE)
