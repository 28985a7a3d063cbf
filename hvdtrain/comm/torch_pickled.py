"""Picklable values of some ranks, gathered as tensors of PyTorch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def gather_pickled(value: T, gather_rows: Callable[[Any, str], Any]) -> list[T]:
    """Collective. Every rank's value, in rank order.

    Args:
        gather_rows: concatenates a tensor of every rank along the first axis, given the tensor and a name.
    """
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = gather_rows(torch.tensor([len(own)]), "lengths").tolist()
    values = gather_rows(own, "values").split(lengths)
    return [pickle.loads(one.numpy().tobytes()) for one in values]
